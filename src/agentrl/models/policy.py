"""The protocol between models and everything else; the trainer knows no other."""

# R rows, L row length, B slots, K new tokens a slot, V vocabulary, D width

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

_SMALL_WIDTH = 128


@dataclass(frozen=True, slots=True)
class Head:
    """The output head: logits = softcap * tanh(scale * (hidden @ weight.T + bias) / softcap).

    `None` means absent. The sampling temperature is not part of the model: callers divide by it.
    """

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    softcap: float | None = None  # Gemma 2
    scale: float | None = None  # Cohere, Granite: multiplies the logits before the soft-cap


def head_logits(head: Head, hidden: Tensor) -> Tensor:
    """Full logits [..., V] of hidden [..., D]: the plain computation that the fast head is tested against."""
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    if head.scale is not None:
        logits = logits * head.scale
    return logits if head.softcap is None else torch.tanh(logits / head.softcap) * head.softcap


class KVCache(Protocol):
    """Keys and values of `num_slots` sequences, each of its own length."""

    num_slots: int
    lengths: Tensor  # [num_slots] int64: tokens held by each slot

    def reset(self, slots: Tensor) -> None:
        """Forget the tokens of slots [B] int64."""
        ...

    def copy(self, source: int, targets: Tensor) -> None:
        """Make slots `targets` [B] int64 hold what slot `source` holds: a shared prompt is computed once."""
        ...


@runtime_checkable
class Policy(Protocol):
    """A causal language model as a torch Module with the three things that training and sampling need."""

    @property
    def module(self) -> nn.Module:
        """The module that owns the parameters (often the policy itself)."""
        ...

    def hidden_states(self, ids: Tensor, position_ids: Tensor, visible_until: Tensor) -> Tensor:
        """Last hidden states [R, L, D], after the final norm, of packed rows.

        ids, position_ids, visible_until [R, L] int64; i reads the token at j iff j <= i < visible_until[j].
        """
        ...

    def head(self) -> Head:
        """The output head."""
        ...

    def new_cache(self, num_slots: int, max_tokens: int) -> Any:
        """An empty KVCache for `num_slots` sequences of at most `max_tokens` tokens."""
        ...

    def extend(self, ids: Tensor, num_new: Tensor, slots: Tensor, cache: Any) -> Tensor:
        """Append ids [B, K] to the cache at slots [B]; row b uses its first num_new[b] tokens.

        Returns the hidden state [B, D] of each row's last appended token, after the final norm.
        """
        ...


@contextmanager
def threads_for(model: Policy) -> Iterator[None]:
    """One thread for a small model on a CPU: waking a second one costs more than its matrix products."""
    weight = model.head().weight
    num_threads = torch.get_num_threads()
    if weight.device.type == "cpu" and weight.shape[1] <= _SMALL_WIDTH:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
