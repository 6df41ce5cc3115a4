"""Which positions of a packed row read which: the pieces that attention computes, derived from two vectors.

Position i of a row reads position j iff j <= i < visible_until[j]. Between two neighbouring values of
`visible_until` no token drops out of sight, so a maximal stretch of positions without such a value in it (a
sequence of a flat row, a node of a prefix tree) shares its ancestors: the earlier tokens still in sight at
its first position. Attention is then one product a stretch, its queries against ancestors plus itself.
"""

# R rows, L row length, B pieces of one call, n queries a piece, m keys a piece

from dataclasses import dataclass
from weakref import ReferenceType, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Forward and backward of one call cost about as much as this many multiply-adds, measured on one x86 core.
CALL_OVERHEAD = 480_000
# Scaled-dot-product kernels work in vectors: on a CPU, 33 queries cost more than 48 do.
TILE = 16
# Queries of a piece at most, where its mask has to be written out: bounds the memory of the masks.
MAX_MASKED_QUERIES = 1024

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Call:
    """One scaled-dot-product call over B pieces, padded to n queries and m keys.

    Whatever pads a piece comes from the piece itself and is masked or never read, so that no score between
    two sequences is ever computed.
    """

    num_pieces: int
    num_queries: int
    num_keys: int
    mask: Tensor | None  # [B or 1, 1, n, m] bool, True where read; None: plainly causal, n == m


@dataclass(frozen=True, slots=True)
class Segments:
    """The calls that together compute every position of the rows.

    `queries` holds each call's [B, n] flat positions in the [R*L] rows, call after call; `keys` its [B, m]
    (ancestors, then the piece itself), and at its end the positions that read only themselves.
    """

    calls: tuple[Call, ...]
    queries: Tensor  # [sum of B*n] int64
    keys: Tensor  # [sum of B*m, + A] int64
    num_alone: int  # A: padding, and sequences of one token
    place: Tensor  # [R*L] int64: where each position stands in `queries` followed by the A alone
    in_order: bool  # the one call's queries and keys are the rows as they stand

    @property
    def cost(self) -> int:
        """Number of scores computed, per head."""
        return sum(call.num_pieces * call.num_queries * call.num_keys for call in self.calls)


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int  # flat position of its first query
    length: int
    ancestors: Ints  # flat positions of the keys before it


def check_visibility(position_ids: Tensor, visible_until: Tensor) -> None:
    """Raise ValueError unless both are [R, L] int64 and every position sees itself within its row."""
    for name, value in (("position_ids", position_ids), ("visible_until", visible_until)):
        if value.ndim != 2 or value.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 [R, L], got {value.dtype} of shape {tuple(value.shape)}")
    if position_ids.shape != visible_until.shape:
        raise ValueError(
            f"position_ids {tuple(position_ids.shape)} and visible_until {tuple(visible_until.shape)} "
            "differ in shape"
        )
    length = visible_until.shape[1]
    row = torch.arange(length, device=visible_until.device)
    if bool(((visible_until <= row) | (visible_until > length)).any()):
        raise ValueError(
            f"visible_until must lie above its own position and at most at the row's end {length}: every "
            "token reads itself and nothing beyond its row; padding at position j has j + 1"
        )


def dense_mask(position_ids: Tensor, visible_until: Tensor, window: int | None = None) -> Tensor:
    """Boolean mask [R, L, L], True where position i (second axis) reads position j (third axis).

    >>> dense_mask(torch.tensor([[0, 1, 0]]), torch.tensor([[2, 2, 3]])).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]
    """
    row = torch.arange(visible_until.shape[1], device=visible_until.device)
    mask = (row[None, :] <= row[:, None]) & (row[:, None] < visible_until[:, None, :])
    if window is not None:
        mask &= position_ids[:, :, None] - position_ids[:, None, :] < window
    return mask


def plan_segments(
    position_ids: Tensor, visible_until: Tensor, *, window: int | None = None, call_overhead: int = 0
) -> Segments:
    """The segments of rows [R, L]; pieces share a call where padding adds at most `call_overhead` scores."""
    device = visible_until.device
    num_rows, length = visible_until.shape
    if window is None and length > 1 and bool((visible_until == length).all()):
        every = torch.arange(num_rows * length, device=device)
        return Segments((Call(num_rows, length, length, None),), every, every, 0, every, in_order=True)
    until, positions = visible_until.cpu().numpy(), position_ids.cpu().numpy()
    alone: list[int] = []
    pieces: list[_Piece] = []
    for r in range(num_rows):
        _cut_row(until[r], positions[r], r * length, window, alone, pieces)
    pieces.sort(key=lambda p: (len(p.ancestors), p.length, -p.start), reverse=True)
    calls: list[Call] = []
    queries: list[Ints] = []
    keys: list[Ints] = []
    is_real: list[NDArray[np.bool_]] = []
    for group in _group(pieces, call_overhead):
        call_queries, call_keys, real, mask = _join(group, positions.reshape(-1), window)
        tensor = None if mask is None else torch.from_numpy(mask).to(device)
        calls.append(Call(len(group), call_queries.shape[1], call_keys.shape[1], tensor))
        queries.append(call_queries.reshape(-1))
        keys.append(call_keys.reshape(-1))
        is_real.append(real.reshape(-1))
    outputs = np.concatenate([*queries, np.array(alone, dtype=np.int64)])
    kept = np.flatnonzero(np.concatenate([*is_real, np.ones(len(alone), dtype=bool)]))
    place = np.empty(num_rows * length, dtype=np.int64)
    place[outputs[kept]] = kept
    return Segments(
        calls=tuple(calls),
        queries=torch.from_numpy(outputs[: outputs.size - len(alone)]).to(device),
        keys=torch.from_numpy(np.concatenate([*keys, outputs[outputs.size - len(alone) :]])).to(device),
        num_alone=len(alone),
        place=torch.from_numpy(place).to(device),
        in_order=False,
    )


def _cut_row(
    until: Ints, positions: Ints, base: int, window: int | None, alone: list[int], pieces: list[_Piece]
) -> None:
    """Append the pieces of one row, and its positions that read only themselves."""
    starts = np.unique(np.concatenate(([0], until)))
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        before = np.flatnonzero(until[:start] > start)
        # A window bounds the keys of a block of queries, and a mask is written out: blocks keep both small.
        block = end - start if window is None and not len(before) else min(window or end, MAX_MASKED_QUERIES)
        for first in range(start, end, block):
            last = min(first + block, end)
            keys = np.concatenate((before, np.arange(start, first)))
            if window is not None:
                keys = keys[positions[keys] > positions[first:last].min() - window]
            if last - first == 1 and not len(keys):
                alone.append(base + first)
            else:
                pieces.append(_Piece(base + first, last - first, base + keys))


def _tiled(size: int) -> int:
    return -(-size // TILE) * TILE


def _group(pieces: list[_Piece], call_overhead: int) -> list[list[_Piece]]:
    """Pieces that share a call: by falling size, while the padding wastes less than one more call."""
    groups: list[list[_Piece]] = []
    most_ancestors = longest = separate = 0
    for piece in pieces:
        ancestors, size = _tiled(len(piece.ancestors)), _tiled(piece.length)
        alone = size * (ancestors + size)
        if groups:
            joined = groups[-1]
            new_ancestors, new_longest = max(most_ancestors, ancestors), max(longest, size)
            padded = (len(joined) + 1) * new_longest * (new_ancestors + new_longest)
            if padded - separate - alone <= call_overhead:
                joined.append(piece)
                most_ancestors, longest, separate = new_ancestors, new_longest, separate + alone
                continue
        groups.append([piece])
        most_ancestors, longest, separate = ancestors, size, alone
    return groups


def _join(
    group: list[_Piece], positions: Ints, window: int | None
) -> tuple[Ints, Ints, NDArray[np.bool_], NDArray[np.bool_] | None]:
    """One call's queries [B, n] and keys [B, m] as flat positions, which queries are real, and the mask."""
    start = np.array([p.start for p in group])[:, None]
    size = np.array([p.length for p in group])[:, None]
    num_ancestors = np.array([len(p.ancestors) for p in group])
    i = np.arange(_tiled(int(size.max())))
    own = start + np.minimum(i, size - 1)
    most = _tiled(int(num_ancestors.max()))
    before = np.broadcast_to(start, (len(group), most)).copy()
    for b, piece in enumerate(group):
        before[b, most - num_ancestors[b] :] = piece.ancestors
    keys = np.concatenate((before, own), axis=1)
    mask: NDArray[np.bool_] | None = None
    if most or window is not None:
        column = np.arange(keys.shape[1])
        reads = (column[None, :] <= most + i[:, None])[None]
        if (num_ancestors != most).any():
            reads = reads & (column >= most - num_ancestors[:, None])[:, None, :]
        if window is not None:
            reads = reads & (positions[own][:, :, None] - positions[keys][:, None, :] < window)
        mask = reads[:, None]
    return own, keys, i < size, mask


@dataclass(slots=True)
class _Memo:
    position_ids: ReferenceType[Tensor]
    versions: tuple[int, int]
    plans: dict[tuple[str, int | None, int], object]


# Every layer of a model asks with the same two tensors; a plan lives as long as the vector behind it.
_MEMOS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def plans_of(position_ids: Tensor, visible_until: Tensor) -> dict[tuple[str, int | None, int], object]:
    """The plans made for these very tensors so far; empty where they are new or were changed in place."""
    if position_ids.is_inference() or visible_until.is_inference():
        return {}  # changes in place leave no trace there
    versions = (position_ids._version, visible_until._version)
    memo = _MEMOS.get(visible_until)
    if memo is None or memo.position_ids() is not position_ids or memo.versions != versions:
        memo = _MEMOS[visible_until] = _Memo(ref(position_ids), versions, {})
    return memo.plans
