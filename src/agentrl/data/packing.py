"""Packed rows: trajectories end to end without padding, shared prefixes once, and nothing leaks."""

# B trajectories, R rows, L row length, N action tokens, T tokens of all trajectories that stand in a row

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.data.bins import Algorithm, Bins, Overflow, min_bins, pack_lengths
from agentrl.data.lengths import one_of, positive_whole
from agentrl.data.prefix_tree import prefix_forest, split_tree
from agentrl.data.trajectory import Trajectory

__all__ = ["ActionTokens", "Bins", "PackedBatch", "min_bins", "pack_lengths", "pack_sequences", "unpack"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ActionTokens:
    """The tokens that the policy sampled, by trajectory and then by offset, whatever row they stand in.

    Trajectories that share a token keep an entry each, with the same source.
    """

    source: Tensor  # [N] int64: flat position in the [R*L] rows of the token whose hidden state predicts it
    target: Tensor  # [N] int64: the token's id
    trajectory: Tensor  # [N] int64: index into the trajectories that were packed
    offset: Tensor  # [N] int64: entry of that trajectory's action_mask
    sample_logp: Tensor  # [N] float32, nats: what the sampler gave it; NaN where none was recorded

    def __len__(self) -> int:
        return self.source.numel()

    def to(self, device: torch.device | str) -> "ActionTokens":
        """The same on a device."""
        return ActionTokens(*(getattr(self, f.name).to(device) for f in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Rows of trajectories; fields also by name: `packed['ids']`.

    Position i of a row may read position j iff `j <= i < visible_until[j]`.

    `action_mask` and `sample_logp` say what the row itself can say: entry j is about the row's token j + 1 as
    the successor of token j. With shared prefixes they hold what any sharer sampled there (the logp of the
    first); a branch's first token, which its prefix predicts from further up the row, is only in `actions`.
    """

    ids: Tensor  # [R, L] int64; pad_id in padding
    position_ids: Tensor  # [R, L] int64: index in the token's own trajectory; 0 in padding
    segment_ids: (
        Tensor  # [R, L] int64: index in its row of the sequence, or of the prefix tree; -1 in padding
    )
    visible_until: Tensor  # [R, L] int64: first position of the row that may no longer read this one
    action_mask: Tensor  # [R, L-1] float32: 1 where the row's next token was sampled by the policy
    sample_logp: Tensor  # [R, L-1] float32, nats; 0 where action_mask is 0; NaN where none was recorded
    rows: list[list[int]]  # the trajectories of each row, in the order in which they stand in it
    actions: ActionTokens
    token_index: Tensor  # [T] int64: flat position of every token, trajectory by trajectory in input order
    lengths: Tensor  # [B] int64: tokens of each trajectory that stand in a row; 0 for a dropped one
    overflowed: list[int]  # trajectories longer than a row, which `overflow` has treated

    def __getitem__(self, name: str) -> Any:
        if name not in self.__slots__:
            raise KeyError(f"no field {name!r}; fields are {', '.join(self.__slots__)}")
        return getattr(self, name)

    @property
    def num_tokens(self) -> int:
        """Positions that hold a token; the rest of the [R*L] is padding."""
        return int((self.segment_ids >= 0).sum())

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same with its tensors on a device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor | ActionTokens)}
        return replace(self, **tensors)

    def split(self) -> "list[PackedBatch]":
        """Each row as a batch of its own without its padding; trajectories keep their indices."""
        return [self._row(row) for row in range(len(self.rows))]

    def _row(self, row: int) -> "PackedBatch":
        used = int((self.segment_ids[row] >= 0).sum())
        width = self.ids.shape[1]
        lengths = torch.zeros_like(self.lengths)
        lengths[self.rows[row]] = self.lengths[self.rows[row]]
        mine = (self.token_index >= row * width) & (self.token_index < (row + 1) * width)
        acts = (self.actions.source >= row * width) & (self.actions.source < (row + 1) * width)
        actions = ActionTokens(*(getattr(self.actions, f.name)[acts] for f in fields(ActionTokens)))
        actions.source.sub_(row * width)
        per_token = ("ids", "position_ids", "segment_ids", "visible_until")
        return PackedBatch(
            **{name: getattr(self, name)[row : row + 1, :used] for name in per_token},
            action_mask=self.action_mask[row : row + 1, : used - 1],
            sample_logp=self.sample_logp[row : row + 1, : used - 1],
            rows=[self.rows[row]],
            actions=actions,
            token_index=self.token_index[mine] - row * width,
            lengths=lengths,
            overflowed=[index for index in self.overflowed if index in self.rows[row]],
        )


def pack_sequences(
    trajs: Iterable[Trajectory],
    max_tokens: int,
    pad_id: int = 0,
    *,
    share_prefixes: bool = False,
    algorithm: Algorithm = "first_fit_decreasing",
    pad_to: int | Literal["row"] | None = "row",
    overflow: Overflow = "raise",
) -> PackedBatch:
    """The trajectories in rows of at most `max_tokens` tokens, each whole in one row.

    With `share_prefixes` a row holds prefix trees: a token stands once for all the row's trajectories that
    agree on it and on everything before it, wherever they were in the input. What a model computes for a
    trajectory stays the same to rounding. A tree larger than a row is split; its parts repeat the prefix.

    `algorithm` chooses the rows, as in `pack_lengths`. `pad_to` is the length of the rows: 'row' pads to
    max_tokens; None pads to the longest row only, so that a batch that fits one row has no padding at all
    (and `.split()` gives several rows as unpadded batches); a number rounds the longest row up to a multiple
    of it, for compiled shapes. `overflow` treats a trajectory longer than max_tokens: 'raise', a longer row
    of its own ('solo'), left out ('drop'), or cut to its first max_tokens tokens ('truncate'); the result's
    `overflowed` lists them.

    >>> def trajectory(ids):
    ...     n = len(ids) - 1
    ...     return Trajectory(torch.tensor(ids), torch.ones(n), torch.full((n,), -0.5), reward=0.0)
    >>> packed = pack_sequences([trajectory([5, 6]), trajectory([5, 7, 8])], max_tokens=6)
    >>> packed.ids.tolist(), packed.visible_until.tolist(), packed.rows
    ([[5, 7, 8, 5, 6, 0]], [[3, 3, 3, 5, 5, 6]], [[1, 0]])
    >>> packed.actions.source.tolist(), packed.actions.target.tolist()
    ([3, 0, 1], [6, 7, 8])
    """
    trajs = list(trajs)
    max_tokens = positive_whole("max_tokens", max_tokens)
    if isinstance(pad_id, bool) or not isinstance(pad_id, int | np.integer) or not 0 <= pad_id < 2**62:
        raise ValueError(f"pad_id must be a token id, a whole number from 0, got {pad_id!r}")
    if pad_to is not None and pad_to != "row":
        pad_to = positive_whole("pad_to, if not 'row' or None,", pad_to)
    lengths = np.array([t.num_tokens for t in trajs], dtype=np.int64)
    overflowed = np.flatnonzero(lengths > max_tokens)
    lengths[overflowed] = _lengths_kept(lengths, overflowed, max_tokens, overflow)
    fits = np.flatnonzero((lengths > 0) & (lengths <= max_tokens))
    rows = [_Row([index], [0]) for index in np.flatnonzero(lengths > max_tokens).tolist()]
    if share_prefixes:
        rows += _tree_rows([trajs[i].ids[: lengths[i]] for i in fits.tolist()], fits, max_tokens, algorithm)
    else:
        for chosen in pack_lengths(lengths[fits], max_tokens, algorithm=algorithm):
            rows.append(_Row(fits[chosen].tolist(), [0] * len(chosen)))

    width = max((int(lengths[row.members].sum()) - sum(row.shared) for row in rows), default=0)
    if pad_to == "row":
        width = max(max_tokens, width)
    elif pad_to is not None:
        width = -(-width // pad_to) * pad_to
    return _fill(trajs, lengths, rows, overflowed.tolist(), _lay_out(rows, lengths, width), pad_id)


def _lengths_kept(lengths: Ints, overflowed: Ints, max_tokens: int, overflow: Overflow) -> Ints:
    """How many tokens of each overflowed trajectory go into a row."""
    one_of("overflow", overflow, get_args(Overflow))
    if overflow == "raise" and overflowed.size:
        first = int(overflowed[0])
        raise ValueError(
            f"trajectory {first} has {lengths[first]} tokens but a row holds {max_tokens}; "
            "raise max_tokens or set overflow='solo', 'drop' or 'truncate'"
        )
    if overflow == "solo":
        return lengths[overflowed]
    return np.full_like(overflowed, max_tokens if overflow == "truncate" else 0)


@dataclass(frozen=True, slots=True)
class _Row:
    members: list[int]  # trajectories in the order in which they stand
    shared: list[int]  # leading tokens that each has in common with the one before it, and does not repeat


def _tree_rows(ids: list[Tensor], index: Ints, max_tokens: int, algorithm: Algorithm) -> list[_Row]:
    """Rows of the prefix trees of `ids`, which are the trajectories at `index`."""
    forest = prefix_forest(ids)
    parts = [part for tree in forest.trees() for part in split_tree(tree, max_tokens)]
    place = np.argsort(forest.members)
    rows: list[_Row] = []
    for chosen in pack_lengths([part.num_tokens for part in parts], max_tokens, algorithm=algorithm):
        # Parts of one tree that meet in a row join again.
        row = forest.keep(np.sort(place[np.concatenate([parts[i].members for i in chosen])]))
        rows.append(_Row(index[row.members].tolist(), row.shared.tolist()))
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Where every token stands."""

    token_index: Ints  # [T] as in PackedBatch
    visible_until: Ints  # [R, L]
    segment_ids: Ints  # [R, L]


def _lay_out(rows: list[_Row], lengths: Ints, width: int) -> _Layout:
    """Places sequences, each of which shares its first `shared` tokens with the one before it in its row.

    Only the rest of a sequence is appended. The tokens appended last and not yet closed form a stack of runs
    of rising depth; a sequence that shares `common` tokens closes whatever is deeper: nothing after it may
    read that. The work is O(sequences) in Python and O(tokens) in numpy.
    """
    start = np.concatenate([[0], np.cumsum(lengths)])
    token_index = np.empty(int(start[-1]), dtype=np.int64)
    visible = np.tile(np.arange(1, width + 1), (len(rows), 1))
    segments = np.full((len(rows), width), -1)
    for row, content in enumerate(rows):
        end, segment, previous = 0, -1, 0
        open_runs: list[tuple[int, int, int]] = []  # depth and place of the first token, number of tokens
        for member, common in zip(content.members, content.shared, strict=True):
            while open_runs:
                depth, place, size = open_runs[-1]
                kept = max(common - depth, 0)
                if kept >= size:
                    break
                visible[row, place + kept : place + size] = end
                open_runs.pop()
                if kept:
                    open_runs.append((depth, place, kept))
            segment += common == 0
            first, new = int(start[member]), int(lengths[member]) - common
            token_index[first : first + common] = token_index[previous : previous + common]
            token_index[first + common : first + common + new] = np.arange(end, end + new) + row * width
            segments[row, end : end + new] = segment
            if new:
                open_runs.append((common, end, new))
            end, previous = end + new, first
        for _, place, size in open_runs:
            visible[row, place : place + size] = end
    return _Layout(token_index, visible, segments)


def _fill(
    trajs: Sequence[Trajectory],
    lengths: Ints,
    rows: list[_Row],
    overflowed: list[int],
    layout: _Layout,
    pad_id: int,
) -> PackedBatch:
    """The batch that a layout stands for."""
    sizes: list[int] = lengths.tolist()
    start = np.cumsum(lengths) - lengths
    tokens = _joined([t.ids[:n] for t, n in zip(trajs, sizes, strict=True)], torch.int64)
    mask = _joined([t.action_mask[: max(n - 1, 0)] for t, n in zip(trajs, sizes, strict=True)], torch.float32)
    logp = _joined([t.sample_logp[: max(n - 1, 0)] for t, n in zip(trajs, sizes, strict=True)], torch.float32)

    shape = layout.visible_until.shape
    num_followed = max(shape[1] - 1, 0)
    ids, positions = np.full(shape, pad_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    ids.reshape(-1)[layout.token_index] = tokens
    positions.reshape(-1)[layout.token_index] = np.arange(tokens.size) - np.repeat(start, lengths)

    num_entries = np.maximum(lengths - 1, 0)
    entry = np.flatnonzero(mask)
    trajectory = np.repeat(np.arange(len(trajs)), num_entries)[entry]
    offset = entry - (np.cumsum(num_entries) - num_entries)[trajectory]
    token = start[trajectory] + offset
    source, follower = layout.token_index[token], layout.token_index[token + 1]

    row_mask, row_logp = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    beside = np.flatnonzero(follower == source + 1)[::-1]  # the first sharer is written last
    row_mask.reshape(-1)[source[beside]] = 1
    row_logp.reshape(-1)[source[beside]] = logp[entry[beside]]
    return PackedBatch(
        ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        segment_ids=torch.from_numpy(layout.segment_ids),
        visible_until=torch.from_numpy(layout.visible_until),
        action_mask=torch.from_numpy(row_mask[:, :num_followed]).contiguous(),
        sample_logp=torch.from_numpy(row_logp[:, :num_followed]).contiguous(),
        rows=[row.members for row in rows],
        actions=ActionTokens(
            source=torch.from_numpy(source),
            target=torch.from_numpy(tokens[token + 1]),
            trajectory=torch.from_numpy(trajectory),
            offset=torch.from_numpy(offset),
            sample_logp=torch.from_numpy(logp[entry]),
        ),
        token_index=torch.from_numpy(layout.token_index),
        lengths=torch.from_numpy(lengths),
        overflowed=overflowed,
    )


def _joined(parts: list[Tensor], dtype: torch.dtype) -> NDArray[Any]:
    return torch.cat([torch.empty(0, dtype=dtype), *(part.detach().cpu() for part in parts)]).numpy()


def unpack(values: Tensor, packed: PackedBatch) -> list[Tensor]:
    """Values of rows as one tensor a trajectory, in the order in which the trajectories were packed.

    Takes values a token [R, L, ...] and gives [n, ...] each, or values an action token [N, ...] and gives
    [num_actions, ...] each; where both shapes fit, the values are read as the tokens'. A dropped trajectory
    gets an empty tensor, a cut one what was kept. Gradients flow back. Raises ValueError for another shape.

    >>> t = Trajectory(torch.tensor([5, 6]), torch.ones(1), torch.zeros(1), reward=0.0)
    >>> packed = pack_sequences([t, t], max_tokens=5)
    >>> [v.tolist() for v in unpack(packed.ids, packed)]
    [[5, 6], [5, 6]]
    """
    if values.shape[:2] == packed.ids.shape:
        flat = values.flatten(0, 1)[packed.token_index.to(values.device)]
        return list(flat.split(packed.lengths.tolist()))
    num_actions = len(packed.actions)
    if values.ndim == 0 or values.shape[0] != num_actions:
        raise ValueError(
            f"values must be [{packed.ids.shape[0]}, {packed.ids.shape[1]}, ...] for the tokens or "
            f"[{num_actions}, ...] for the action tokens, got shape {tuple(values.shape)}"
        )
    counts = torch.bincount(packed.actions.trajectory, minlength=packed.lengths.numel())
    return list(values.split(counts.tolist()))
