"""From the raw product hidden @ weight.T to a logit, and its softmax statistics, one tile at a time.

z = softcap * tanh(scale * (hidden @ weight.T + bias) / softcap) / temperature
"""

# N tokens, V vocabulary; n, v the sides of one tile

from dataclasses import dataclass
from typing import NamedTuple

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

    def squash_(self, raw: Tensor, tile: Tile) -> Tensor:
        """Turn a tile's raw products [n, v] into the soft-cap's tanh, where there is one."""
        return self._squash_(raw, slice(tile.v0, tile.v1))

    def stretch_(self, squashed: Tensor, tile: Tile) -> Tensor:
        """Turn what `squash_` made of a tile [n, v] into logits."""
        temperatures = self.temperatures
        return self._stretch_(
            squashed, None if temperatures is None else temperatures[tile.n0 : tile.n1, None]
        )

    def at_(self, raw: Tensor, ids: Tensor) -> Tensor:
        """Turn the raw products [N] of one id a token into logits, in the raw products' dtype."""
        return self._stretch_(self._squash_(raw, ids), self.temperatures)

    def _squash_(self, raw: Tensor, ids: slice | Tensor) -> Tensor:
        if self.bias is not None:
            raw.add_(self.bias[ids])
        return raw if self.softcap is None else raw.mul_(self.scale / self.softcap).tanh_()

    def _stretch_(self, squashed: Tensor, temperatures: Tensor | None) -> Tensor:
        factor = self.slope if self.softcap is None else self.softcap / self.temperature
        if factor != 1.0:
            squashed.mul_(factor)
        return squashed if temperatures is None else squashed.div_(temperatures)

    def token_slope(self, start: int, stop: int) -> Tensor | float:
        """dz / d(raw product) of tokens [start, stop), but for the soft-cap: a number, or [n]."""
        return self.slope if self.temperatures is None else self.slope / self.temperatures[start:stop]

    def cap_slope(self, logits: Tensor, start: int) -> Tensor:
        """The soft-cap's derivative 1 - tanh^2 [n] at float64 logits [n] of the tokens from `start` on."""
        assert self.softcap is not None
        tanh = logits * (self.temperature / self.softcap)
        if self.temperatures is not None:
            tanh = tanh * self.temperatures[start : start + len(logits)]
        return 1.0 - tanh.square()


def id_columns(ids: Tensor, tile: Tile, vocab_start: int) -> tuple[Tensor, Tensor]:
    """Each token's id [N] as a column [n, 1] of the tile, any if it lies elsewhere, and if it is here.

    No shape depends on the data, so a GPU never waits.
    """
    column = ids[tile.n0 : tile.n1, None] - (vocab_start + tile.v0)
    inside = column.clamp(0, tile.v1 - tile.v0 - 1)
    return inside, column == inside


@dataclass(slots=True)
class Statistics:
    """Running statistics of each token's softmax, all [N] in the wide dtype but for the target's logit.

    That comes from a product in float64, and the sums leave the target out until the end: its own rounding
    would otherwise be the largest error of a log-prob. Next is that of the likeliest other token, which is
    noted, so that `correct` can replace its term, and backward its probability.
    """

    target: Tensor  # the target's logit, float64; 0 where another rank holds it
    maximum: Tensor
    sum_exp: Tensor  # sum over v other than the target of exp(z_v - maximum)
    weighted: Tensor | None  # sum over the same v of exp(z_v - maximum) * (z_v - maximum), for the entropy
    top: Tensor | None  # int64: this rank's row of the largest logit; -1 before any; None where not noted
    top_logit: Tensor | None = None  # float64: the exact logit of that row, once known
    error: Tensor | None = None  # float64: the exact term of that row, less the one in the sum
    weighted_error: Tensor | None = None  # float64: the same for `weighted`

    @staticmethod
    def start(target: Tensor, precision: Precision, *, entropy: bool) -> "Statistics":
        """Statistics of no logits yet. The maximum starts finite: a padded vocabulary's first tile may hold
        nothing but -inf, and -inf - (-inf) is NaN."""
        sum_exp = torch.zeros_like(target, dtype=precision.wide)
        maximum = torch.full_like(sum_exp, torch.finfo(precision.wide).min)
        rounds_alike = precision.narrow and precision.logits == "input"
        notes_top = precision.wide != precision.exact and not rounds_alike
        return Statistics(
            target,
            maximum,
            sum_exp,
            weighted=torch.zeros_like(sum_exp) if entropy else None,
            top=torch.full_like(target, -1, dtype=torch.int64) if notes_top else None,
        )

    def update_(
        self, logits: Tensor, targets: Tensor, tile: Tile, vocab_start: int, buffers: Buffers
    ) -> tuple[Tensor, Tensor]:
        """Take in a tile's logits; returns exp(z - maximum) [n, v], 0 at the target, and exp(old - new
        maximum) [n].

        The logits are overwritten, without entropy by what is returned.
        """
        tokens = slice(tile.n0, tile.n1)
        old, total = self.maximum[tokens], self.sum_exp[tokens]
        new = torch.maximum(old, logits.amax(1))
        shift = old - new
        rescale = shift.exp()
        if self.top is not None:
            _note_top_(self.top[tokens], logits, new > old, tile.v0)
        logits.sub_(new[:, None])
        if self.weighted is None:
            exp = logits.exp_()
        else:
            clamp_log_(logits)
            exp = torch.exp(logits, out=buffers.take("exp", logits.shape, logits.dtype))
        column, here = id_columns(targets, tile, vocab_start)
        exp.scatter_(1, column, exp.gather(1, column).masked_fill_(here, 0.0))
        if self.weighted is not None:
            weighted = self.weighted[tokens]
            weighted.add_(total * shift.clamp(min=-_LOG_ZERO)).mul_(rescale).add_(logits.mul_(exp).sum(1))
        total.mul_(rescale).add_(exp.sum(1))
        old.copy_(new)
        return exp, rescale

    def correct(self, exact_top: Tensor, target_rows: Tensor) -> None:
        """Take in the exact logit [N] of the largest term, where it is not the target's."""
        assert self.top is not None
        above = exact_top - self.maximum  # the rounding of that logit, which stands in the sums as exp(0)
        # where it is above a nat, so are those of the other logits, and nothing is left to correct
        other = (self.top >= 0) & (self.top != target_rows) & (above.abs() <= 1.0)
        self.top, self.top_logit = self.top.where(other, -1), exact_top
        self.error = torch.expm1(above).where(other, 0.0)
        if self.weighted is not None:
            self.weighted_error = (above * above.exp()).where(other, 0.0)

    def combine_(self, group: dist.ProcessGroup) -> Tensor:
        """Add up the statistics of ranks that each saw their own shard of the vocabulary.

        Returns exp(own - common maximum) [N].
        """
        shift = self.maximum.clone()
        dist.all_reduce(self.maximum, dist.ReduceOp.MAX, group=group)
        shift.sub_(self.maximum)
        rescale = shift.exp()
        if self.weighted is not None:
            shift.clamp_(min=-_LOG_ZERO)
            self.weighted.add_(self.sum_exp * shift)
            if self.error is not None and self.weighted_error is not None:
                self.weighted_error.add_(self.error * shift)
        for part in (self.sum_exp, self.weighted, self.error, self.weighted_error):
            if part is not None:
                dist.all_reduce(part.mul_(rescale), group=group)
        dist.all_reduce(self.target, group=group)
        return rescale

    def scores(self) -> "Scores":
        """What the complete statistics amount to."""
        above = self.target - self.maximum
        log_exact = log_sum(self.sum_exp if self.error is None else self.sum_exp + self.error, above)
        log_prob, wide = above - log_exact, self.maximum.dtype
        entropy = top_log_prob = None
        if self.top_logit is not None:
            top_log_prob = (self.top_logit - self.maximum - log_exact).clamp_(max=0.0).to(wide)
        if self.weighted is not None:
            weighted = self.weighted if self.weighted_error is None else self.weighted + self.weighted_error
            probability = log_prob.exp()
            expected = weighted * inverse(log_exact) + (probability * above).where(probability > 0, 0.0)
            entropy = (log_exact - expected).clamp_(min=0.0).to(wide)
        return Scores(
            log_prob=log_prob.clamp(max=0.0).to(wide),
            entropy=entropy,
            maximum=self.maximum,
            log_total=log_exact.to(wide),
            target_logit=self.target.to(wide),
            top=self.top,
            top_log_prob=top_log_prob,
        )


class Scores(NamedTuple):
    """A token's scores, all [N] in the wide dtype but for `top`, rounded once."""

    log_prob: Tensor
    entropy: Tensor | None
    maximum: Tensor  # the largest logit, as rounded in its tile
    log_total: Tensor  # log-sum-exp less the maximum: their sum would be rounded
    target_logit: Tensor
    top: Tensor | None  # this rank's likeliest row but the target, -1 for none, where noted
    top_log_prob: Tensor | None


# Logits copied at a time to find the largest of scattered tokens.
_COPIED_BYTES = 1 << 19


def _note_top_(top: Tensor, logits: Tensor, grew: Tensor, first_row: int) -> None:
    """Write the row of the vocabulary where a tile's tokens have their largest logit, where that `grew`.

    argmax costs as much as exp. Few maxima grow after the first tiles, so on CPU it sees those alone; on CUDA
    no shape may depend on the data.
    """
    if logits.is_cuda:
        top.copy_(torch.where(grew, logits.argmax(1) + first_row, top))
        return
    tokens = grew.nonzero().squeeze(1)
    if len(tokens) == len(top):
        top.copy_(logits.argmax(1)).add_(first_row)
        return
    block = max(1, _COPIED_BYTES // (logits.shape[1] * logits.element_size()))
    for some in tokens.split(block):
        top[some] = logits[some].argmax(1) + first_row


# exp(-800) is 0 in float64, and so in float32: below it a log-prob may be cut without a trace in p or p *
# log p.
_LOG_ZERO = 800.0


def log_sum(sum_exp: Tensor, above: Tensor) -> Tensor:
    """log(sum_exp + exp(above)) in the dtype of `above`, which may be beyond exp's range."""
    return torch.logaddexp(sum_exp.to(above.dtype).log(), above)


def inverse(log_total: Tensor) -> Tensor:
    """exp(-log_total), but at most e^40.

    A total below e^-40 of the largest term comes of roundings above 40 nats, at logits of 1e8; the terms that
    this multiplies are 0 then, and would become NaN.
    """
    return log_total.clamp(min=-40.0).neg().exp()


def clamp_log_(log_probs: Tensor) -> Tensor:
    """Cut log-probs at -800, so that p * log p is 0, not NaN, where p is 0; NaN stays NaN."""
    return log_probs.clamp_(min=-_LOG_ZERO)
