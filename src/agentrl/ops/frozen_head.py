"""A head that is frozen: hidden's gradient does not wait for the upstream gradient, forward sums it too."""

# N tokens, V vocabulary (of this rank), D width

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.ops.gradient_sums import RowSum, as_operand, divide_by_units_
from agentrl.ops.logit_map import Scores, Statistics, inverse, log_sum
from agentrl.ops.tiled_head import TiledHead
from agentrl.ops.tiles import WIDENED_ROWS, Tile


class FrozenHead(TiledHead):
    """A tiled head of which hidden alone wants a gradient: two matrix products."""

    def scores_with_hidden_slope(self) -> tuple[Scores, Tensor, Tensor | None]:
        """The scores, and d log-prob / d hidden [N, D] in hidden's dtype, in the same pass: two products.

        A float16 slope waits for its upstream gradient in units, which come third, float32 [N].

        With q = exp(z - running maximum), sum_v q_v W_v is rescaled as the maximum grows and divided by
        sum_v q_v at the end, which shards of the vocabulary do in common, with their statistics. The target
        stays out of the sum: (1 - p_y) W_y - sum_{v != y} p_v W_v loses nothing where p_y is close to 1,
        W_y - sum_v p_v W_v would.
        """
        found = Statistics.start(self._target_logits(), self.precision, entropy=False)
        hidden = self.hidden.source
        # shards of the vocabulary add up their parts before anything is rounded
        dtype = hidden.dtype if self.group is None else self.precision.wide
        slope = torch.empty_like(hidden, dtype=dtype, memory_format=torch.contiguous_format)
        held = [slope] if slope.dtype == self.precision.wide else None
        units = None
        if slope.dtype == torch.float16:
            units = slope.new_empty(len(self.targets), dtype=self.precision.wide)
        sums = RowSum(slope, held, self.precision, self.buffers, units=units)
        for tile in self.grid.walk(vocab_outermost=False):
            self._add(tile, found, sums)
            if tile.last_in_row and self.group is None:
                self._finish(sums, found, tile.n0, tile.n1)
        self._correct(found)
        if self.group is not None:
            num_tokens = len(self.targets)
            slope[:num_tokens].mul_(found.combine_(self.group)[:, None])
            for start in range(0, num_tokens, self.grid.tokens):
                stop = min(start + self.grid.tokens, num_tokens)
                self._finish(sums, found, start, stop)
            dist.all_reduce(slope[:num_tokens], group=self.group)
            if hidden.dtype == torch.float16:
                units = divide_by_units_(slope[:num_tokens])
        return found.scores(), slope.to(hidden.dtype), units

    def _add(self, tile: Tile, found: Statistics, sums: RowSum) -> None:
        """Take in a tile, in the scores and in the rows of hidden's slope."""
        squashed = self._squashed(tile)
        cap = self._cap_slope(squashed)
        logits = self.logit_map.stretch_(squashed, tile)
        _, rescale = found.update_(logits, self.targets, tile, self.vocab_start, self.buffers)
        if cap is not None:
            logits.mul_(cap)
        if self.precision.narrow and logits.device.type == "cpu":
            # A bfloat16 product may add 0 times the row below, a NaN too; the row's own sum of
            # exponentials brings its NaN back.
            invalid = rescale.isnan()
            if bool(invalid.any()):
                logits[invalid] = 0.0
        if not tile.first_in_row:
            sums.rows(tile.n0, tile.n1).mul_(rescale[:, None])
        weight = self.weight.tile(tile.v0, tile.v1, self.precision.gradient_operands)
        operand = as_operand(logits, self.precision, self.buffers)
        sums.add(tile.n0, tile.n1, operand, weight, first=tile.first_in_row, last=False)

    def _finish(self, sums: RowSum, found: Statistics, start: int, stop: int) -> None:
        tokens = slice(start, stop)
        above = found.target[tokens] - found.maximum[tokens]
        log_total = log_sum(found.sum_exp[tokens], above)
        rest = -torch.expm1(above - log_total)
        if self.logit_map.softcap is not None:
            rest = rest * self.logit_map.cap_slope(found.target[tokens], start)
        slope = self.logit_map.token_slope(start, stop)
        ids, here = self._target_rows(tokens)
        rows = sums.rows(start, stop)
        others, own = (
            (-slope * inverse(log_total)).to(rows.dtype),
            (rest * slope).where(here, 0.0).to(rows.dtype),
        )
        parts = (part.split(WIDENED_ROWS) for part in (rows, others, own, ids))
        for some, scaled, weighted, id_rows in zip(*parts, strict=True):
            target_rows = self.weight.source.index_select(0, id_rows).to(rows.dtype)
            some.mul_(scaled[:, None]).addcmul_(target_rows, weighted[:, None])
        sums.finish(start, stop)
