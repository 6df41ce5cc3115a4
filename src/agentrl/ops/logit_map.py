"""From the raw product hidden @ weight.T to a logit, and its softmax statistics, one tile at a time.

z = softcap * tanh(scale * (hidden @ weight.T + bias) / softcap) / temperature
"""

# N tokens, V vocabulary; n, v the sides of one tile

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.ops.tiles import Buffers, Precision, Tile


@dataclass(frozen=True, slots=True)
class LogitMap:
    """The element-wise part of the head. `None` means absent."""

    bias: Tensor | None  # [V], wide dtype
    scale: float
    softcap: float | None
    temperature: float
    temperatures: Tensor | None  # [N], wide dtype: one a token, on top of the float

    @property
    def slope(self) -> float:
        """dz / d(raw product), but for the soft-cap and the temperature of the token."""
        return self.scale / self.temperature

    def select(self, rows: Tensor) -> "LogitMap":
        """The same map for the tokens `rows` alone."""
        temperatures = None if self.temperatures is None else self.temperatures[rows]
        return LogitMap(self.bias, self.scale, self.softcap, self.temperature, temperatures)

    def apply_(self, raw: Tensor, tile: Tile) -> Tensor:
        """Turn a tile's raw products [n, v] into logits."""
        if self.bias is not None:
            raw.add_(self.bias[tile.v0 : tile.v1])
        if self.softcap is not None:
            raw.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        elif self.slope != 1.0:
            raw.mul_(self.slope)
        return raw if self.temperatures is None else raw.div_(self.temperatures[tile.n0 : tile.n1, None])

    def token_slope(self, start: int, stop: int) -> Tensor | float:
        """dz / d(raw product) of tokens [start, stop), but for the soft-cap: a number, or [n]."""
        return self.slope if self.temperatures is None else self.slope / self.temperatures[start:stop]

    def cap_slope(self, logits: Tensor, start: int, out: Tensor | None = None) -> Tensor:
        """The soft-cap's derivative 1 - tanh^2 [n, k] at logits [n, k] of the tokens from `start` on."""
        assert self.softcap is not None
        factor: Tensor | float = self.temperature / self.softcap
        if self.temperatures is not None:
            factor = factor * self.temperatures[start : start + logits.shape[0], None]
        tanh = torch.mul(logits, factor, out=out)
        return tanh.square_().neg_().add_(1.0)


def target_columns(targets: Tensor, tile: Tile, vocab_start: int) -> tuple[Tensor, Tensor]:
    """Each token's target as a column [n, 1] of the tile, 0 where it lies elsewhere, and whether it is here.

    No shape depends on the data, so a GPU never waits.
    """
    column = targets[tile.n0 : tile.n1, None] - (vocab_start + tile.v0)
    here = (column >= 0) & (column < tile.v1 - tile.v0)
    return column.where(here, 0), here


@dataclass(slots=True)
class Statistics:
    """Running statistics of each token's softmax, all [N] in the wide dtype."""

    maximum: Tensor
    sum_exp: Tensor  # sum over v of exp(z_v - maximum)
    target: Tensor  # the target's logit, once its tile has been seen, else 0
    weighted: Tensor | None  # sum over v of exp(z_v - maximum) * (z_v - maximum), for the entropy

    @staticmethod
    def empty(num_tokens: int, precision: Precision, device: torch.device, *, entropy: bool) -> "Statistics":
        """Statistics of no logits yet. The maximum starts finite: a padded vocabulary's first tile may hold
        nothing but -inf, and -inf - (-inf) is NaN."""
        lowest = torch.finfo(precision.wide).min
        zeros = [
            torch.zeros(num_tokens, dtype=precision.wide, device=device) for _ in range(3 if entropy else 2)
        ]
        return Statistics(
            torch.full_like(zeros[0], lowest), zeros[0], zeros[1], zeros[2] if entropy else None
        )

    def update_(
        self, logits: Tensor, targets: Tensor, tile: Tile, vocab_start: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor]:
        """Take in a tile's logits; returns exp(z - maximum) [n, v] and exp(old - new maximum) [n].

        The logits are overwritten, without entropy by what is returned.
        """
        tokens = slice(tile.n0, tile.n1)
        column, here = target_columns(targets, tile, vocab_start)
        target = self.target[tokens]
        target.copy_(torch.where(here, logits.gather(1, column), target[:, None]).squeeze(1))
        old, total = self.maximum[tokens], self.sum_exp[tokens]
        new = torch.maximum(old, logits.amax(1))
        shift = old - new
        rescale = shift.exp()
        logits.sub_(new[:, None])
        if self.weighted is None:
            exp = logits.exp_()
        else:
            clamp_log_(logits)
            exp = torch.exp(logits, out=buffers.take("exp", logits.shape, logits.dtype))
            weighted = self.weighted[tokens]
            weighted.add_(total * shift.clamp(min=-_LOG_ZERO)).mul_(rescale).add_(logits.mul_(exp).sum(1))
        total.mul_(rescale).add_(exp.sum(1))
        old.copy_(new)
        return exp, rescale

    def log_sum_exp(self) -> Tensor:
        """log sum exp of the logits [N]."""
        return self.maximum + self.sum_exp.log()

    def combine_(self, group: dist.ProcessGroup) -> None:
        """Add up the statistics of ranks that each saw their own shard of the vocabulary."""
        shift = self.maximum.clone()
        dist.all_reduce(self.maximum, dist.ReduceOp.MAX, group=group)
        shift.sub_(self.maximum)
        rescale = shift.exp()
        if self.weighted is not None:
            self.weighted.add_(self.sum_exp * shift.clamp_(min=-_LOG_ZERO)).mul_(rescale)
            dist.all_reduce(self.weighted, group=group)
        self.sum_exp.mul_(rescale)
        dist.all_reduce(self.sum_exp, group=group)
        dist.all_reduce(self.target, group=group)

    def entropy(self) -> Tensor:
        """The entropy in nats [N]: lse - E[z]."""
        assert self.weighted is not None
        return self.sum_exp.log() - self.weighted / self.sum_exp


# exp(-800) is 0 in float64, and so in float32: below it a log-prob may be cut without a trace in p or p *
# log p.
_LOG_ZERO = 800.0


def clamp_log_(log_probs: Tensor) -> Tensor:
    """Cut log-probs at -800, so that p * log p is 0, not NaN, where p is 0; NaN stays NaN."""
    return log_probs.clamp_(min=-_LOG_ZERO)
