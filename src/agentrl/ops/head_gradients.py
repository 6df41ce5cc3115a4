"""Gradients of the head: which are wanted, what of each token they need, what comes out."""

# N tokens that take part, V vocabulary (of this rank), D width

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.ops.gradient_sums import divide_by_units_
from agentrl.ops.head_inputs import HeadInputs
from agentrl.ops.logit_map import Scores, clamp_log_


class Upstream:
    """What backward needs of each token that takes part, all [N] in the wide dtype."""

    def __init__(self, logp: Tensor, entropy: Tensor | None, scores: Scores) -> None:
        self.logp = logp  # d loss / d log-prob
        self.entropy = entropy  # d loss / d entropy
        self.scores = scores
        # g (1 - p_y) - h p_y (log p_y + H), exact where p_y is near 1
        self.at_target = -logp * torch.expm1(scores.log_prob)  # d loss / d logit of the target
        if entropy is not None and scores.entropy is not None:
            self.at_target -= entropy * _surprise(scores.log_prob, scores.entropy)
        self.at_top = None  # the same of the likeliest other id, where its logit is known without rounding
        if scores.top_log_prob is not None:
            self.at_top = -logp * scores.top_log_prob.exp()
            if entropy is not None and scores.entropy is not None:
                self.at_top -= entropy * _surprise(scores.top_log_prob, scores.entropy)

    def active_rows(self) -> Tensor:
        """The tokens that carry a gradient, int64 and ascending."""
        active = self.logp != 0
        if self.entropy is not None:
            active |= self.entropy != 0
        return active.nonzero().squeeze(1)

    def select(self, rows: Tensor) -> "Upstream":
        """The same for the tokens `rows` alone."""
        logp, entropy, *scores = (
            None if part is None else part[rows] for part in (self.logp, self.entropy, *self.scores)
        )
        return Upstream(cast(Tensor, logp), entropy, Scores(*cast(Any, scores)))


def _surprise(log_prob: Tensor, entropy: Tensor) -> Tensor:
    """p * (log p + H), by which the entropy falls as the logit grows."""
    return log_prob.exp() * clamp_log_(log_prob.clone()).add_(entropy)


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
    # what the rows of hidden and weight are still to be multiplied by, [N] and [V]; None means nothing
    hidden_units: Tensor | None = None
    weight_units: Tensor | None = None


def reduce_and_cast(found: Gradients, inputs: HeadInputs, *, waiting: bool = False) -> Gradients:
    """Add up the parts of vocabulary shards, and give every gradient its input's dtype.

    `waiting`: a factor is still to come, so float16 rows are in units, and a float16 bias's or temperature's
    gradient stays wide.
    """
    parts = (found.hidden, found.weight, found.bias, found.temperatures)
    if inputs.settings.group is not None:
        for part in (found.hidden, found.temperatures):
            if part is not None:
                dist.all_reduce(part, group=inputs.settings.group)
    units = found.hidden_units
    half = waiting and inputs.hidden.dtype == torch.float16
    if half and found.hidden is not None and found.hidden.dtype != inputs.hidden.dtype:
        units = divide_by_units_(found.hidden)
    dtypes = (None if tensor is None else tensor.dtype for tensor in inputs[:4])
    hidden, weight, bias, temperatures = (
        part if part is None or (waiting and part.ndim == 1 and dtype == torch.float16) else part.to(dtype)
        for part, dtype in zip(parts, dtypes, strict=True)
    )
    return Gradients(hidden, weight, bias, temperatures, units, found.weight_units)
