"""Gradients of the head: which are wanted, what of each token they need, what comes out."""

# N tokens that take part, V vocabulary (of this rank), D width

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from agentrl.ops.head_inputs import HeadInputs


@dataclass(frozen=True, slots=True)
class Upstream:
    """What backward needs of each token that takes part, all [N] in the wide dtype."""

    logp: Tensor  # d loss / d log-prob
    entropy: Tensor | None  # d loss / d entropy
    log_sum_exp: Tensor
    entropy_value: Tensor | None
    target_logit: Tensor | None = None  # what a stash that rounds, even to zero, cannot give back

    def active_rows(self) -> Tensor:
        """The tokens that carry a gradient, int64 and ascending."""
        active = self.logp != 0
        if self.entropy is not None:
            active |= self.entropy != 0
        return active.nonzero().squeeze(1)

    def select(self, rows: Tensor) -> "Upstream":
        """The same for the tokens `rows` alone."""
        parts = (self.logp, self.entropy, self.log_sum_exp, self.entropy_value, self.target_logit)
        return Upstream(*(None if part is None else part[rows] for part in parts))  # type: ignore[arg-type]


class Needs(NamedTuple):
    """Which inputs want a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    temperatures: bool

    def only_hidden(self) -> bool:
        """Whether the head itself is frozen."""
        return self.hidden and not (self.weight or self.bias or self.temperatures)


@dataclass(slots=True)
class Gradients:
    """Gradients of the loss with respect to the head's inputs; None where not wanted."""

    hidden: Tensor | None = None  # [N, D]; zero for tokens that take no part
    weight: Tensor | None = None  # [V, D]
    bias: Tensor | None = None  # [V]
    temperatures: Tensor | None = None  # [N]
    unit: Tensor | float = 1.0  # what all of them are still to be multiplied by


def reduce_and_cast(found: Gradients, inputs: HeadInputs) -> Gradients:
    """Add up the parts of vocabulary shards, and give every gradient its input's dtype."""
    parts = (found.hidden, found.weight, found.bias, found.temperatures)
    if inputs.settings.group is not None:
        for part in (found.hidden, found.temperatures):
            if part is not None:
                dist.all_reduce(part, group=inputs.settings.group)
    dtypes = (None if tensor is None else tensor.dtype for tensor in inputs[:4])
    hidden, weight, bias, temperatures = (
        None if part is None else part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True)
    )
    return Gradients(hidden, weight, bias, temperatures)
