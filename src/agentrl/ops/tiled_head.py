"""The head in tiles: softmax statistics forward, gradients backward, never more than one tile of logits."""

# N tokens, V vocabulary (of this rank), D width; n, v the sides of one tile

import torch
from torch import Tensor

from agentrl.ops.gradient_sums import GradientSums, Phase, spread, spread_rows_
from agentrl.ops.head_gradients import Gradients, Needs, Upstream
from agentrl.ops.head_inputs import HeadInputs
from agentrl.ops.logit_map import LogitMap, Scores, Statistics, clamp_log_, id_columns, inverse
from agentrl.ops.stash import Stash
from agentrl.ops.tiles import Buffers, Factor, Grid, Tile, wide_product


class TiledHead:
    """The logits [N, V] of hidden [N, D] under the head, as tiles that exist one at a time.

    A stash, reserved for the same tokens, keeps their exponentials from `scores` to `gradients`.
    """

    def __init__(self, inputs: HeadInputs, rows: Tensor | None = None, stash: Stash | None = None) -> None:
        hidden, weight, bias, temperatures, targets, settings = inputs
        self.precision = settings.precision
        wide = self.precision.wide
        self.vocab_start = settings.vocab_start
        self.group = settings.group
        self.spare_bytes = settings.tile_bytes
        self.rows = rows  # int64, ascending: the tokens that take part; None means all
        self.stash = stash
        self.buffers = Buffers(hidden.device)
        self.hidden = Factor("hidden", hidden, rows, self.buffers)
        self.weight = Factor("weight", weight, None, self.buffers)
        self.targets = targets if rows is None else targets[rows]
        logit_map = LogitMap(
            bias=None if bias is None else bias.to(wide),
            scale=settings.scale,
            softcap=settings.softcap,
            temperature=settings.temperature,
            temperatures=None if temperatures is None else temperatures.to(wide),
        )
        self.logit_map = logit_map if rows is None else logit_map.select(rows)
        num_tokens, (num_vocab, width) = len(self.targets), weight.shape
        if stash is None:
            self.grid = Grid.fit(num_tokens, num_vocab, width, settings.tile_bytes, self.precision)
        else:
            self.grid = stash.grid

    def logits(self, tile: Tile) -> Tensor:
        """A tile's logits [n, v] in the wide dtype; the next tile overwrites them."""
        return self.logit_map.stretch_(self._squashed(tile), tile)

    def _squashed(self, tile: Tile) -> Tensor:
        """What a tile's logits are stretched from."""
        operands = self.precision.logit_operands
        hidden = self.hidden.tile(tile.n0, tile.n1, operands)
        weight = self.weight.tile(tile.v0, tile.v1, operands)
        logits = self.buffers.take("tile", (len(hidden), len(weight)), self.precision.wide)
        if self.precision.narrow and self.precision.logits == "input":
            rounded = self.buffers.take("narrow", (len(hidden), len(weight)), operands)
            logits.copy_(torch.mm(hidden, weight.T, out=rounded))
        else:
            wide_product(hidden, weight.T, out=logits)
        return self.logit_map.squash_(logits, tile)

    def _target_rows(self, tokens: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """The tokens' targets as rows of this rank's weight [n], 0 where another has it, and whether not."""
        rows = self.targets[tokens] - self.vocab_start
        here = (rows >= 0) & (rows < len(self.weight.source))
        return rows.where(here, 0), here

    def _target_logits(self) -> Tensor:
        """The logit of each token's target [N], float64; 0 where another rank holds it."""
        rows, here = self._target_rows()
        return self._exact_logits(rows).where(here, 0.0)

    def _exact_logits(self, ids: Tensor) -> Tensor:
        """Each token's logit of one row of the weight [N], float64, by products in float64.

        With `logits="input"` it is rounded as the others are.
        """
        precision, num_tokens = self.precision, len(self.targets)
        raw = self.hidden.source.new_empty(num_tokens, dtype=precision.exact)
        block = max(64, self.spare_bytes // (64 * self.weight.source.shape[1]))
        for start in range(0, num_tokens, block):
            tokens = slice(start, start + block)
            hidden = self.hidden.source[tokens if self.rows is None else self.rows[tokens]]
            weight = self.weight.source.index_select(0, ids[tokens])
            raw[tokens] = (hidden.to(precision.exact) * weight.to(precision.exact)).sum(1)
        if precision.narrow and precision.logits == "input":
            raw = raw.to(precision.inputs).to(precision.exact)
        return self.logit_map.at_(raw, ids)

    def _correct(self, found: Statistics) -> None:
        if found.top is not None:
            rows, here = self._target_rows()
            exact = self._exact_logits(found.top.clamp(min=0))
            found.correct(exact, rows.where(here, -1))

    def scores(self, *, entropy: bool) -> Scores:
        """One pass over the tiles, which the stash keeps as far as it reaches: one matrix product.

        With a soft-cap, it keeps tanh instead: a slope 1 - tanh^2 is lost in the rounding of a logit.
        """
        found = Statistics.start(self._target_logits(), self.precision, entropy=entropy)
        for tile in self.grid.walk(vocab_outermost=True):
            self._score(tile, found)
        self._correct(found)
        if self.group is not None:
            found.combine_(self.group)
        return found.scores()

    def _score(self, tile: Tile, found: Statistics) -> None:
        capped = self.logit_map.softcap is not None
        squashed = self._squashed(tile)
        if self.stash is not None and capped:
            self.stash.keep(tile, squashed, found.maximum)
        logits = self.logit_map.stretch_(squashed, tile)
        exp, _ = found.update_(logits, self.targets, tile, self.vocab_start, self.buffers)
        if self.stash is not None and not capped:
            self.stash.keep(tile, exp, found.maximum)

    def gradients(self, upstream: Upstream, needs: Needs, *, waiting: bool = False) -> Gradients:
        """Recompute the tiles that the stash does not hold, and sum the gradients of all.

        One product for the logits, one for hidden, one for the weight. The stash is lost. `waiting`: a factor
        is still to come, so rows that are cast to float16 are in units.
        """
        if len(self.targets) == 0:
            return self._zero_gradients(needs)
        upstream, unscale = self._sloped(upstream)
        found = self._empty_gradients(needs, waiting=waiting)
        sums = GradientSums(
            self.grid, found.hidden, found.weight, self.precision, self.buffers, unscale,
            stashed=self.stash is not None, spare_bytes=self.spare_bytes,
            hidden_units=found.hidden_units, weight_units=found.weight_units,
        )  # fmt: skip
        for phase, tile in sums.walk():
            self._add_gradients(phase, tile, upstream, found, sums)
        for part in (found.bias, found.temperatures):
            if part is not None and unscale is not None:
                part.mul_(unscale)
        if self.rows is not None:
            if found.hidden is not None:
                spread_rows_(found.hidden, self.rows)
            num_tokens = len(self.hidden.source)
            if found.temperatures is not None:
                found.temperatures = spread(found.temperatures, self.rows, num_tokens)
            if found.hidden_units is not None:
                found.hidden_units = spread(found.hidden_units, self.rows, num_tokens)
        return found

    def _add_gradients(
        self, phase: Phase, tile: Tile, upstream: Upstream, found: Gradients, sums: GradientSums
    ) -> None:
        """Add a tile's part to all that its phase sums.

        Nothing refers to its memory afterwards: a larger tile, beyond a cut of the grid, takes its place.
        """
        temperatures = found.temperatures if phase.inner else None
        # the log-probs of 16-bit exponentials are off by 2^-9, of which entropies that vary less keep nothing
        blurred = self.precision.narrow and (upstream.entropy is not None or temperatures is not None)
        readable = phase.inner and phase.outer and not blurred
        gradient = self._tile_gradient(tile, upstream, temperatures, self.stash if readable else None)
        if found.bias is not None and phase.inner:
            found.bias[tile.v0 : tile.v1] += gradient.sum(0)
        sums.add(phase, tile, gradient, self.hidden, self.weight)

    def _empty_gradients(self, needs: Needs, *, waiting: bool) -> Gradients:
        """Memory for what is wanted; sums of bias and temperatures start at zero."""
        hidden, weight, wide = self.hidden.source, self.weight.source, self.precision.wide
        found = Gradients()
        if needs.hidden:
            # shards of the vocabulary add up their parts before anything is rounded
            dtype = hidden.dtype if self.group is None else wide
            found.hidden = torch.empty_like(hidden, dtype=dtype, memory_format=torch.contiguous_format)
        if needs.weight and self.stash is not None:
            found.weight = self.stash.weight_gradient
        elif needs.weight:
            found.weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        if waiting and found.hidden is not None and found.hidden.dtype == torch.float16:
            found.hidden_units = hidden.new_empty(len(self.targets), dtype=wide)
        if waiting and found.weight is not None and found.weight.dtype == torch.float16:
            found.weight_units = weight.new_empty(len(weight), dtype=wide)
        if needs.bias:
            found.bias = hidden.new_zeros(len(weight), dtype=wide)
        if needs.temperatures:
            found.temperatures = hidden.new_zeros(len(self.targets), dtype=wide)
        return found

    def _zero_gradients(self, needs: Needs) -> Gradients:
        hidden, weight = self.hidden.source, self.weight.source
        weight_gradient = None
        if needs.weight:
            weight_gradient = (
                torch.zeros_like(weight) if self.stash is None else self.stash.weight_gradient.zero_()
            )
        return Gradients(
            hidden=torch.zeros_like(hidden) if needs.hidden else None,
            weight=weight_gradient,
            bias=weight.new_zeros(len(weight)) if needs.bias else None,
            temperatures=hidden.new_zeros(len(hidden)) if needs.temperatures else None,
        )

    def _tile_gradient(
        self, tile: Tile, upstream: Upstream, temperatures: Tensor | None, stash: Stash | None
    ) -> Tensor:
        """d loss / d raw product of a tile, in place of its logits.

        dz = g * 1_y - p * (g + h * (log p + H)) with g, h the upstream gradients of log-prob and entropy.
        """
        held = None if stash is None else stash.held(tile, self.buffers)
        capped = self.logit_map.softcap is not None
        if held is not None and upstream.entropy is None and temperatures is None and not capped:
            return self._held_gradient(tile, upstream, *held)
        cap = None
        if held is not None and not capped:
            logits = self._held_logits(tile, upstream, *held)
        else:
            squashed = self._squashed(tile) if held is None else self._copied(held[0])
            cap = self._cap_slope(squashed)
            logits = self.logit_map.stretch_(squashed, tile)
        tokens = slice(tile.n0, tile.n1)
        # p = exp(z - maximum) / total: less the rounded log-sum-exp, a likely logit would lose its distance
        scores = upstream.scores
        gradient = logits.sub_(scores.maximum[tokens, None])
        kept = None
        if temperatures is not None:
            # The tile's gradients add up to zero over the vocabulary, so any multiple of 1 may be left out.
            kept = self.buffers.take("kept", logits.shape, logits.dtype).copy_(gradient)
            above = scores.target_logit - scores.maximum
            self._put(kept, tile, self.targets, self.vocab_start, above)
        logp_gradient = upstream.logp[tokens, None]
        log_total = scores.log_total[tokens, None]
        share = inverse(log_total)
        if upstream.entropy is None or scores.entropy is None:
            gradient.exp_().mul_(-logp_gradient * share)
        else:
            entropy_gradient = upstream.entropy[tokens, None]
            constant = logp_gradient + entropy_gradient * (scores.entropy[tokens, None] - log_total)
            exp = torch.exp(gradient, out=self.buffers.take("exp", logits.shape, logits.dtype))
            clamp_log_(gradient).mul_(-entropy_gradient * share).sub_(constant * share).mul_(exp)
        self._put_exact(gradient, tile, upstream)
        if kept is not None and temperatures is not None:
            # A logit of -inf has no gradient; 0 * inf would make it NaN.
            kept.mul_(gradient).masked_fill_(gradient == 0, 0.0)
            temperatures[tokens].sub_(kept.sum(1), alpha=1 / self.logit_map.slope)
        return gradient if cap is None else gradient.mul_(cap)

    def _held_gradient(self, tile: Tile, upstream: Upstream, exp: Tensor, maximum: Tensor) -> Tensor:
        """g * (1_y - p) with p = exp(z - m) * exp(m - maximum) / total: one pass over the tile."""
        tokens = slice(tile.n0, tile.n1)
        log_total = upstream.scores.log_total[tokens, None] - (
            maximum - upstream.scores.maximum[tokens, None]
        )
        factor = inverse(log_total).mul_(-upstream.logp[tokens, None])
        return self._put_exact(self._copied(exp).mul_(factor), tile, upstream)

    def _held_logits(self, tile: Tile, upstream: Upstream, exp: Tensor, maximum: Tensor) -> Tensor:
        """Logits from exp(z - maximum). Where that is 0, so is p and any finite logit will do, but for the
        target: its gradient does not vanish with its p.
        """
        logits = self._copied(exp)
        clamp_log_(logits.log_()).add_(maximum)
        return self._put(logits, tile, self.targets, self.vocab_start, upstream.scores.target_logit)

    def _copied(self, held: Tensor) -> Tensor:
        return self.buffers.take("tile", held.shape, self.precision.wide).copy_(held)

    def _put_exact(self, gradient: Tensor, tile: Tile, upstream: Upstream) -> Tensor:
        """Overwrite a tile's d loss / d logit [n, v] where logits are known without rounding."""
        if upstream.scores.top is not None and upstream.at_top is not None:
            self._put(gradient, tile, upstream.scores.top, 0, upstream.at_top)
        return self._put(gradient, tile, self.targets, self.vocab_start, upstream.at_target)

    @staticmethod
    def _put(plane: Tensor, tile: Tile, ids: Tensor, first_id: int, values: Tensor) -> Tensor:
        """Overwrite a tile [n, v] by the tokens' values [N] where their ids [N] lie in it."""
        column, here = id_columns(ids, tile, first_id)
        chosen = torch.where(here, values[tile.n0 : tile.n1, None], plane.gather(1, column))
        return plane.scatter_(1, column, chosen)

    def _cap_slope(self, squashed: Tensor) -> Tensor | None:
        """The soft-cap's derivative in a tile [n, v], where there is one."""
        if self.logit_map.softcap is None:
            return None
        cap = self.buffers.take("cap", squashed.shape, squashed.dtype)
        return torch.mul(squashed, squashed, out=cap).neg_().add_(1.0)

    def _sloped(self, upstream: Upstream) -> tuple[Upstream, Tensor | None]:
        """The upstream gradients times d logit / d raw product, and what to multiply sums with afterwards.

        float16 ends at 6e-8, where gradients of a mean over many tokens begin: they are brought near 1,000
        first.
        """
        slope = self.logit_map.token_slope(0, len(self.targets))
        logp, entropy, unscale = upstream.logp * slope, upstream.entropy, None
        entropy = None if entropy is None else entropy * slope
        if self.precision.gradient_operands == torch.float16 and len(logp):
            largest = (
                logp.abs().amax()
                if entropy is None
                else torch.maximum(logp.abs().amax(), entropy.abs().amax())
            )
            unscale = torch.where(largest.isfinite() & (largest > 0), largest / 1024, 1.0)
            logp, entropy = logp / unscale, None if entropy is None else entropy / unscale
        return Upstream(logp, entropy, upstream.scores), unscale
