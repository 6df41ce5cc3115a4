"""The attention function that transformers' registry calls for packed rows and for cached decoding.

A model keeps its own attention for every other call (`model(ids)`, `model.generate`), to the bit: the name
registered here only takes over where `HFPolicy` passes its keyword along.
"""

# R rows, L row length, H query heads, G key-value heads, E head width

import functools
import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentrl.models.hf_cache import Append
from agentrl.ops.attention import attention

PREFIX = "agentrl_"
KEYWORD = "agentrl_call"  # transformers hands a forward's unknown keywords on to the attention function


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What attention needs of packed rows: position i reads j iff j <= i < visible_until[j]."""

    position_ids: Tensor  # [R, L] int64
    visible_until: Tensor  # [R, L] int64


def switch_attention(model: PreTrainedModel) -> None:
    """Make a model look its attention up under our name, which its own implementation still serves.

    Raises ValueError where the model's attention does not go through transformers' registry.
    """
    own = model.config._attn_implementation or "eager"
    if own.startswith(PREFIX):
        return
    if own not in ("eager", "sdpa"):  # a flash kernel's mask has another form
        own = "sdpa" if model._supports_sdpa else "eager"
    name = PREFIX + own
    if model.is_backend_compatible():
        AttentionInterface.register(name, functools.partial(_attend, own))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
        model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(
            f"{type(model).__name__} does not take its attention from transformers' registry, so packed rows "
            "cannot be kept apart in it; use a model whose class says _supports_attention_backend"
        )


def _attend(
    own: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [R, L, H, E] of query [R, H, L, E] over key, value [R, G, L, E]."""
    call: PackedRows | Append | None = keywords.pop(KEYWORD, None)
    if call is None:
        plain = (
            sys.modules[type(module).__module__].eager_attention_forward
            if own == "eager"
            else ALL_ATTENTION_FUNCTIONS[own]
        )
        keywords |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        return plain(module, query, key, value, attention_mask, softcap=softcap, **keywords)
    for name, what in (("s_aux", "attention sinks"), ("position_bias", "a learned position bias")):
        if keywords.get(name) is not None:
            raise ValueError(f"{type(module).__name__} uses {what}, which packed attention does not compute")
    if dropout:
        raise ValueError(
            f"{type(module).__name__} drops attention weights at random (rate {dropout}) while training, so "
            "its log-probs are not the sampler's; set attention_dropout=0 in the model's config"
        )
    if isinstance(call, PackedRows):
        out = attention(
            query,
            key,
            value,
            call.position_ids,
            call.visible_until,
            window=sliding_window,
            softcap=softcap,
            scale=scaling,
        )
    else:
        layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
        out = call.attend(layer, query, key, value, sliding_window, softcap, scaling)
    return out.transpose(1, 2).contiguous(), None
