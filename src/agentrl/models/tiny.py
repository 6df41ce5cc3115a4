"""TinyAgent: a small pre-norm decoder with learned positions, fast on a CPU."""

# R rows, L row length, B slots, K new tokens a slot, D width, H heads, E head width, V vocabulary

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agentrl.models.policy import Head
from agentrl.ops.attention import attention


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyConfig:
    """The shape of a TinyAgent."""

    vocab_size: int
    width: int = 64
    num_layers: int = 4
    num_heads: int = 4
    max_positions: int = 256
    init_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "num_layers", "num_heads", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} must be a multiple of num_heads {self.num_heads}")


class TinyCache:
    """Keys and values of `num_slots` sequences of at most `max_tokens` tokens, each of its own length."""

    def __init__(self, config: TinyConfig, num_slots: int, max_tokens: int, like: Tensor) -> None:
        head_width = config.width // config.num_heads
        shape = (config.num_layers, num_slots, config.num_heads, max_tokens, head_width)
        self.num_slots = num_slots
        self.keys = like.new_zeros(shape)
        self.values = like.new_zeros(shape)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=like.device)

    def reset(self, slots: Tensor) -> None:
        """Forget the tokens of slots [B] int64."""
        self.lengths[slots] = 0

    def copy(self, source: int, targets: Tensor) -> None:
        """Make slots `targets` [B] int64 hold what slot `source` holds."""
        length = int(self.lengths[source])
        for store in (self.keys, self.values):
            store[:, targets, :, :length] = store[:, source : source + 1, :, :length]
        self.lengths[targets] = length


class _Layer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, position_ids: Tensor, visible_until: Tensor) -> Tensor:
        """The layer's output [R, L, D] for packed rows x [R, L, D]."""
        q, k, v = self.heads(x)
        return self.finish(x, attention(q, k, v, position_ids, visible_until))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [R, H, L, E] of x [R, L, D]."""
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [R, L, D] from its input and the attention outputs [R, H, L, E]."""
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


def _sinusoids(num_positions: int, width: int) -> Tensor:
    """Positions [num_positions, width] to start from: a shift is a rotation, which heads find quickly."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(2.0 * num_positions) / width))
    angles = torch.arange(num_positions)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width] * 2**0.5


class TinyAgent(nn.Module):
    """A causal decoder with tied embeddings; implements `models.policy.Policy`.

    >>> model = TinyAgent(TinyConfig(vocab_size=11))
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    """

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.max_positions, config.width)
        self.layers = nn.ModuleList(_Layer(config.width, config.num_heads) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.width, bias=False)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        generator = torch.Generator().manual_seed(self.config.init_seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            std = 0.02 if "embedding" in name else parameter.shape[1] ** -0.5
            if name.endswith(("out.weight", "down.weight")):  # keeps the residual stream at unit scale
                std /= (2 * self.config.num_layers) ** 0.5
            parameter.normal_(0.0, std, generator=generator)
        self.position_embedding.weight.copy_(_sinusoids(self.config.max_positions, self.config.width) * 0.02)

    def _blocks(self) -> list[_Layer]:
        return [cast(_Layer, layer) for layer in self.layers]

    @property
    def module(self) -> nn.Module:
        """The module that owns the parameters: this one."""
        return self

    def head(self) -> Head:
        """The output head: the token embedding, tied."""
        return Head(self.token_embedding.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [R, L, V] of plain causal rows ids [R, L]."""
        rows, length = ids.shape
        position_ids = torch.arange(length, device=ids.device).expand(rows, length)
        hidden = self.hidden_states(ids, position_ids, torch.full_like(ids, length))
        return hidden @ self.token_embedding.weight.T

    def _embed(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        if ids.numel() and int(position_ids.max()) >= self.config.max_positions:
            raise ValueError(
                f"position {int(position_ids.max())} is beyond this TinyAgent's {self.config.max_positions} "
                "positions; lower max_tokens or build it with a larger max_positions"
            )
        return self.token_embedding(ids) + self.position_embedding(position_ids)

    def hidden_states(self, ids: Tensor, position_ids: Tensor, visible_until: Tensor) -> Tensor:
        """Hidden states [R, L, D] after the final norm, of packed rows ids [R, L]; see Policy."""
        x = self._embed(ids, position_ids)
        for layer in self._blocks():
            x = layer(x, position_ids, visible_until)
        return self.final_norm(x)

    def new_cache(self, num_slots: int, max_tokens: int) -> TinyCache:
        """An empty cache for `num_slots` sequences of at most `max_tokens` tokens.

        Raises ValueError for more tokens than the model has positions.
        """
        if max_tokens > self.config.max_positions:
            raise ValueError(
                f"this TinyAgent has {self.config.max_positions} positions, fewer than {max_tokens} tokens; "
                "lower max_tokens or build it with a larger max_positions"
            )
        return TinyCache(self.config, num_slots, max_tokens, self.token_embedding.weight)

    def extend(self, ids: Tensor, num_new: Tensor, slots: Tensor, cache: TinyCache) -> Tensor:
        """Append the first num_new[b] >= 1 tokens of each row of ids [B, K] to slots [B] of the cache.

        Returns the hidden states [B, D] of the last appended tokens. Slots must be distinct.
        """
        batch, width = ids.shape
        offset = torch.arange(width, device=ids.device)
        starts = cache.lengths[slots]
        is_new = offset < num_new[:, None]
        position_ids = torch.where(is_new, starts[:, None] + offset, 0)
        ends = starts + num_new
        total = int(ends.max())
        visible = torch.arange(total, device=ids.device) <= position_ids[:, :, None]
        x = self._embed(ids, position_ids)
        row, column = is_new.nonzero(as_tuple=True)
        slot_of, place = slots[row], position_ids[row, column]
        every_slot = torch.arange(cache.num_slots, device=ids.device)
        in_place = torch.equal(slots, every_slot)  # all slots in order: read the cache without a copy
        for i, layer in enumerate(self._blocks()):
            q, k, v = layer.heads(x)
            keys, values = cache.keys[i], cache.values[i]
            keys[slot_of, :, place] = k[row, :, column]
            values[slot_of, :, place] = v[row, :, column]
            keys, values = keys[:, :, :total], values[:, :, :total]
            if not in_place:
                keys, values = keys[slots], values[slots]
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible[:, None])
            x = layer.finish(x, attended)
        cache.lengths[slots] = ends
        last = x[torch.arange(batch, device=ids.device), num_new - 1]
        return self.final_norm(last)
