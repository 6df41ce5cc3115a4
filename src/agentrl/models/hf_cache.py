"""Keys and values of ragged slots for a Hugging Face model, filled by the registered attention function."""

# S slots, B rows of one call, K new tokens a row, M longest length after them, H query and G key-value heads,
# E head width

from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.ops.attention import masked_attention


class HFCache:
    """Keys and values of `num_slots` sequences of at most `max_tokens` tokens, each of its own length.

    A layer's store is made when it first appends, in the shape and dtype of its keys.
    """

    def __init__(self, num_slots: int, max_tokens: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values [S, G, max_tokens, E]

    def reset(self, slots: Tensor) -> None:
        """Forget the tokens of slots [B] int64."""
        self.lengths[slots] = 0

    def copy(self, source: int, targets: Tensor) -> None:
        """Make slots `targets` [B] int64 hold what slot `source` holds."""
        length = int(self.lengths[source])
        for stores in self.layers.values():
            for store in stores:
                store[targets, :, :length] = store[source : source + 1, :, :length]
        self.lengths[targets] = length

    def stores(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of one layer, made like keys, values [B, G, K, E] if it has none yet."""
        if layer not in self.layers:
            shape = (self.num_slots, keys.shape[1], self.max_tokens)
            self.layers[layer] = (
                keys.new_zeros(*shape, keys.shape[3]),
                values.new_zeros(*shape, values.shape[3]),
            )
        return self.layers[layer]


@dataclass(frozen=True, slots=True)
class Append:
    """One call that appends num_new[b] tokens of each row of ids [B, K] to slots [B] of a cache."""

    cache: HFCache
    slots: Tensor  # [B] int64, distinct
    num_new: Tensor  # [B] int64, at least 1
    position_ids: Tensor  # [B, K] int64: the tokens' places in their slots; a row's padding repeats its last
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # window -> [B, 1, K, M] bool

    @staticmethod
    def of(ids: Tensor, num_new: Tensor, slots: Tensor, cache: HFCache) -> "Append":
        """The call, checked: ValueError where a slot would overflow or a row brings no token."""
        starts = cache.lengths[slots]
        if int(num_new.min()) < 1 or int(num_new.max()) > ids.shape[1]:
            raise ValueError(
                f"num_new must lie between 1 and the width {ids.shape[1]} of ids, got {num_new.tolist()}"
            )
        if int((starts + num_new).max()) > cache.max_tokens:
            raise ValueError(
                f"a slot would hold {int((starts + num_new).max())} tokens but the cache was made for "
                f"{cache.max_tokens}; raise max_tokens in new_cache"
            )
        offset = torch.arange(ids.shape[1], device=ids.device)
        return Append(cache, slots, num_new, starts[:, None] + torch.minimum(offset, num_new[:, None] - 1))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        softcap: float | None,
        scale: float | None,
    ) -> Tensor:
        """Attention outputs [B, H, K, E] of the new tokens, once stored, over all tokens of their slots."""
        keys, values = self.cache.stores(layer, k, v)
        row, column = (torch.arange(q.shape[2], device=q.device) < self.num_new[:, None]).nonzero(
            as_tuple=True
        )
        slot, place = self.slots[row], self.position_ids[row, column]
        keys[slot, :, place] = k[row, :, column]
        values[slot, :, place] = v[row, :, column]
        total = int(self.position_ids.max()) + 1
        if window not in self.masks:
            distance = self.position_ids[:, :, None] - torch.arange(total, device=q.device)
            seen = distance >= 0
            self.masks[window] = (seen if window is None else seen & (distance < window))[:, None]
        return masked_attention(
            q,
            keys[self.slots, :, :total],
            values[self.slots, :, :total],
            self.masks[window],
            softcap=softcap,
            scale=scale,
        )
