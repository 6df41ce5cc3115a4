"""Attention over packed rows: position i of a row reads position j iff j <= i < visible_until[j]."""

# R rows, L row length, H query heads, G key-value heads, E head width

import torch
import torch.nn.functional as F
from torch import Tensor


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
) -> Tensor:
    """Attention outputs [R, H, L, E] of q [R, H, L, E] over k, v [R, G, L, E]."""
    length = q.shape[2]
    if bool((visible_until == length).all()) and window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    row = torch.arange(length, device=q.device)
    mask = (row[None, :] <= row[:, None]) & (row[None, :, None] < visible_until[:, None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale)
