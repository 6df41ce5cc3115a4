"""Attention over packed rows: position i of a row reads position j iff j <= i < visible_until[j]."""

# R rows, L row length, H query heads, G key-value heads, E head width, B pieces of a call

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.ops.visibility import (
    CALL_OVERHEAD,
    Segments,
    check_visibility,
    dense_mask,
    plan_segments,
    plans_of,
)

FLEX_BLOCK = 128  # tokens a block of FlexAttention's BlockMask

Backend = Literal["auto", "segments", "dense", "flex"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_ids: Tensor,
    visible_until: Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attention outputs [R, H, L, E] of q [R, H, L, E] over k, v [R, G, L, E].

    Query head h reads key head h // (H / G). Scores are scale * q.k (scale defaults to E**-0.5), then
    softcap * tanh(score / softcap) if there is a soft-cap. A window lets position i read j only where
    position_ids[i] - position_ids[j] < window: distance along the sequence, which in a prefix tree is not
    the distance along the row.

    Backends agree to rounding: `segments` computes the scores that are read and few others, `dense` masks
    all of a row's, `flex` is FlexAttention. `auto` is flex on CUDA, elsewhere whichever of the first two
    costs less. The structure behind the two vectors is derived once and kept while the tensor
    `visible_until` lives, so passing the same tensors to every layer costs nothing.

    Raises ValueError where shapes or numbers do not fit or a token would read beyond its row.

    >>> q = torch.ones(1, 2, 3, 4)
    >>> v = torch.tensor([1.0, 3.0, 7.0]).view(1, 1, 3, 1).expand(1, 1, 3, 4)
    >>> attention(q, v, v, torch.tensor([[0, 1, 0]]), torch.tensor([[2, 2, 3]]), scale=0.0)[0, 0, :, 0]
    tensor([1., 2., 7.])
    """
    _check(q, k, v, visible_until, window, softcap, scale)
    if backend == "auto" and q.is_cuda:
        backend = "flex"
    plans = plans_of(position_ids, visible_until)
    width = q.shape[1] * q.shape[3]
    key = (backend, window, width)
    plan = plans.get(key)
    if plan is None:
        plan = plans[key] = _plan(backend, position_ids, visible_until, window, width)
    if isinstance(plan, Segments):
        return _by_segments(q, k, v, plan, softcap, scale)
    if isinstance(plan, Tensor):
        return masked_attention(q, k, v, plan, softcap=softcap, scale=scale)
    return _by_flex(q, k, v, plan, softcap, scale)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention outputs [B, H, n, E] of q [B, H, n, E] over k, v [B, G, m, E] under a boolean mask.

    mask [B or 1, 1, n, m] is True where a query reads a key; None is plainly causal (n == m).
    """
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    batch, num_heads, n, width = q.shape
    num_groups, m = k.shape[1], k.shape[2]
    # The heads of a group share their keys: stack their queries, so that each key matrix is read once.
    grouped = q.reshape(batch, num_groups, num_heads // num_groups * n, width)
    scores = (grouped @ k.transpose(-1, -2)).view(batch, num_heads, n, m)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = torch.tanh(scores * ((width**-0.5 if scale is None else scale) / softcap)) * softcap
    if mask is None:
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril()
    probs = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype)
    return (probs.view(batch, num_groups, -1, m) @ v).view(batch, num_heads, n, v.shape[3])


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible_until: Tensor,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> None:
    if q.ndim != 4 or k.ndim != 4 or q.shape[::2] != k.shape[::2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q [R, H, L, E] and k [R, G, L, E] do not fit: got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} differ in rows, heads or length")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key-value heads")
    if visible_until.shape != (q.shape[0], q.shape[2]):
        raise ValueError(
            f"visible_until must be [R, L] = {(q.shape[0], q.shape[2])}, got {tuple(visible_until.shape)}"
        )
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(
            f"window must be at least 1 (a token reads itself), a whole number of tokens; got {window!r}"
        )
    if softcap is not None and (isinstance(softcap, bool) or not (math.isfinite(softcap) and softcap > 0)):
        raise ValueError(f"softcap must be positive and finite, or None for no softcap; got {softcap!r}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, or None for 1 / sqrt(head width); got {scale!r}")


def _plan(
    backend: str, position_ids: Tensor, visible_until: Tensor, window: int | None, width: int
) -> object:
    """Segments, a dense mask [R, 1, L, L] or a BlockMask; `width` is heads times head width."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    check_visibility(position_ids, visible_until)
    nothing = position_ids.numel() == 0
    if window is not None and (nothing or int(position_ids.max() - position_ids.min()) < window):
        window = None  # no distance reaches it
    if backend == "flex":
        return _block_mask(position_ids, visible_until, window)
    if backend != "dense":
        overhead = CALL_OVERHEAD // width
        segments = plan_segments(position_ids, visible_until, window=window, call_overhead=overhead)
        num_rows, length = visible_until.shape
        dense_cost = overhead + num_rows * length * length
        if backend == "segments" or segments.cost + len(segments.calls) * overhead <= dense_cost:
            return segments
    return dense_mask(position_ids, visible_until, window)[:, None]


def _by_segments(
    q: Tensor, k: Tensor, v: Tensor, plan: Segments, softcap: float | None, scale: float | None
) -> Tensor:
    if plan.in_order:
        return masked_attention(q, k, v, plan.calls[0].mask, softcap=softcap, scale=scale)
    num_rows, num_heads, length, _ = q.shape
    calls = plan.calls
    # One gather a tensor: its backward is one scatter, however many calls there are.
    size_q = [c.num_pieces * c.num_queries for c in calls]
    size_k = [*(c.num_pieces * c.num_keys for c in calls), plan.num_alone]
    all_q = _tokens(q).index_select(0, plan.queries).split(size_q)
    all_k = _tokens(k).index_select(0, plan.keys).split(size_k)
    all_v = _tokens(v).index_select(0, plan.keys).split(size_k)
    outputs: list[Tensor] = []
    for call, *mine in zip(calls, all_q, all_k[:-1], all_v[:-1], strict=True):
        piece_q, piece_k, piece_v = (x.unflatten(0, (call.num_pieces, -1)).transpose(1, 2) for x in mine)
        out = masked_attention(piece_q, piece_k, piece_v, call.mask, softcap=softcap, scale=scale)
        outputs.append(_tokens(out))
    # One score, so its softmax is 1 and the output is the value.
    outputs.append(all_v[-1].repeat_interleave(num_heads // v.shape[1], dim=1))
    joined = torch.cat(outputs).index_select(0, plan.place)
    return joined.unflatten(0, (num_rows, length)).transpose(1, 2)


def _tokens(x: Tensor) -> Tensor:
    """x [rows, heads, length, E] as [rows*length, heads, E]."""
    return x.transpose(1, 2).flatten(0, 1)


def _block_mask(position_ids: Tensor, visible_until: Tensor, window: int | None) -> object:
    """FlexAttention's BlockMask, from the extremes of each block of tokens: no [L, L] mask is ever made."""
    from torch.nn.attention.flex_attention import BlockMask

    def reads(row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j <= i) & (i < visible_until[row, j])
        return seen if window is None else seen & (position_ids[row, i] - position_ids[row, j] < window)

    length = visible_until.shape[1]
    padding = -length % FLEX_BLOCK
    until = F.pad(visible_until, (0, padding)).unflatten(1, (-1, FLEX_BLOCK))  # what pads is read by nobody
    places = F.pad(position_ids, (0, padding)).unflatten(1, (-1, FLEX_BLOCK))
    num_blocks = until.shape[1]
    first = torch.arange(num_blocks, device=until.device) * FLEX_BLOCK
    last = first + FLEX_BLOCK - 1
    # [R, query blocks, key blocks]: whether some pair may be seen (the rule decides within), whether all are.
    some = (first[None, :] <= last[:, None]) & (until.amax(2)[:, None, :] > first[:, None])
    every = (last[None, :] <= first[:, None]) & (until.amin(2)[:, None, :] > last[:, None])
    if window is not None:
        low, high = places.amin(2), places.amax(2)
        some &= low[:, :, None] - high[:, None, :] < window
        every &= high[:, :, None] - low[:, None, :] < window
    some &= ~every

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]

    return BlockMask.from_kv_blocks(
        *listed(some), *listed(every), BLOCK_SIZE=FLEX_BLOCK, mask_mod=reads, seq_lengths=(length, length)
    )


def _by_flex(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Any, softcap: float | None, scale: float | None
) -> Tensor:
    def capped(score: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cast(float, softcap) * torch.tanh(score / cast(float, softcap))

    return _flex_attention(q.is_cuda)(
        q,
        k,
        v,
        score_mod=None if softcap is None else capped,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


@functools.cache
def _flex_attention(compiled: bool) -> Callable[..., Tensor]:
    """FlexAttention, fused on CUDA; uncompiled it writes all scores out, which is for tests."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else cast(Callable[..., Tensor], flex_attention)
