"""Gradients of hidden and weight, summed over tiles: in the wide dtype, in no memory but their own."""

# N tokens that take part, V vocabulary, D width; R rows of one gradient; n, v the sides of one tile

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.ops.tiles import WIDENED_ROWS, Buffers, Factor, Grid, Precision, Tile, wide_product

# Of sums added to at a time where dtypes differ: PyTorch widens the addend in memory of its own.
_WIDENED_BYTES = 1 << 19
# Moved at a time where rows change their place within one memory.
_MOVED_BYTES = 1 << 18
# Of a column's 16-bit tiles that wait for a common product, and as many of their tokens' rows of hidden,
# which are copied where only some tokens take part.
_WAITING_BYTES = 2 << 20


class RowSum:
    """A gradient [R, D] as a sum of products, accumulated in the wide dtype and cast once.

    `sums` are the running sums of all rows, in pieces; None where a tile's products follow each other, so
    that one tile of rows will do. They are the gradient itself, or the first piece may lie in its memory:
    rows are finished in ascending order, and a 16-bit row ends before the sums of later rows begin.
    """

    def __init__(
        self,
        gradient: Tensor,
        sums: Sequence[Tensor] | None,
        precision: Precision,
        buffers: Buffers,
        unscale: Tensor | None = None,
        units: Tensor | None = None,
    ) -> None:
        self.gradient = gradient
        self.sums = sums
        self.precision = precision
        self.buffers = buffers
        self.unscale = unscale  # divides out the factor that kept float16 products in range
        self.units = units  # [R], written where rows are cast: what each is still to be multiplied by

    def rows(self, start: int, stop: int) -> Tensor:
        """The running sums of rows [start, stop), none across the end of a piece, in the wide dtype."""
        if self.sums is None:
            return self.buffers.take("sums", (stop - start, self.gradient.shape[1]), self.precision.wide)
        for piece in self.sums:
            if start < len(piece):
                return piece[start:stop]
            start, stop = start - len(piece), stop - len(piece)
        raise AssertionError("these rows have no sums")

    def add(self, start: int, stop: int, lhs: Tensor, rhs: Tensor, *, first: bool, last: bool) -> None:
        """Add lhs @ rhs to rows [start, stop); the first product overwrites what is there, the last finishes.

        On CPU a single 16-bit product, rounded once, is the gradient itself. Unless the CPU's are `native`,
        each of several is rounded before it is added.
        """
        on_cuda = self.precision.device.type == "cuda"
        if first and last and lhs.dtype == self.gradient.dtype and self.unscale is None and not on_cuda:
            torch.mm(lhs, rhs, out=self.gradient[start:stop])
            return
        sums = self.rows(start, stop)
        if lhs.dtype == sums.dtype or self.precision.native or (on_cuda and first):
            wide_product(lhs, rhs, out=sums, accumulate=not first)
        else:
            # 16-bit factors are a copy of the tile, whose own memory is free by now
            part = self.buffers.take("tile", sums.shape, sums.dtype if on_cuda else lhs.dtype)
            if on_cuda:
                wide_product(lhs, rhs, out=part)
                sums.add_(part)
            else:
                torch.mm(lhs, rhs, out=part)
                block = _rows_of(_WIDENED_BYTES, sums)
                for total, term in zip(sums.split(block), part.split(block), strict=True):
                    total.copy_(term) if first else total.add_(term)
        if last:
            self.finish(start, stop)

    def finish(self, start: int, stop: int) -> None:
        """Cast rows [start, stop) to the gradient's dtype, in units or not, once their last product is in."""
        sums, gradient = self.rows(start, stop), self.gradient[start:stop]
        if self.unscale is not None:
            sums.mul_(self.unscale)
        if self.units is not None:
            self.units[start:stop] = divide_by_units_(sums)
        if self.sums is None or self.sums[0].data_ptr() != self.gradient.data_ptr():
            gradient.copy_(sums)
        elif self.sums[0] is not self.gradient:
            block = _rows_of(_MOVED_BYTES, sums)
            for total, row in zip(sums.split(block), gradient.split(block), strict=True):
                # by way of other memory: a row may overlap its own sums
                row.copy_(self.buffers.take("cast", total.shape, row.dtype).copy_(total))


class Phase(NamedTuple):
    """A walk over part of the outer side, tokens or vocabulary, and which gradients it adds to."""

    start: int
    stop: int
    inner: bool
    outer: bool


class GradientSums:
    """The gradients of hidden [N, D] and of the weight [V, D], summed over the tiles of a grid.

    The gradient of the outer loop's side is summed one tile of rows at a time. Every outer tile adds to all
    rows of the other, the inner gradient. Where that has 16 bits, its float32 sums take the memory of both:
    its own, which holds the sums of half of its rows, and the last rows of the outer gradient, as many as the
    inner one has, which are the last to be written. The tiles of those are computed twice: for the inner
    gradient, and once that is finished, for the outer.
    """

    def __init__(
        self,
        grid: Grid,
        hidden: Tensor | None,
        weight: Tensor | None,
        precision: Precision,
        buffers: Buffers,
        unscale: Tensor | None,
        *,
        stashed: bool,
        spare_bytes: int,
        hidden_units: Tensor | None = None,
        weight_units: Tensor | None = None,
    ) -> None:
        """`hidden` (at least N rows) and `weight` are the gradients, unwritten; None where not wanted.

        So are their rows' units, float32 [N] and [V]; None where rows are cast as they are.
        `stashed`: the weight's gradient holds exponentials until each of its tiles is written. Inner sums of
        at most `spare_bytes` have memory of their own.
        """
        longer = precision.narrow and hidden is not None and grid.num_tokens > grid.num_vocab
        if longer and not stashed:  # a tile's tokens have sums of their own beside their copies
            grid = replace(grid, tokens=max(1, grid.tokens // 2))
        self.grid = grid
        self.vocab_outermost = stashed or (weight is not None and not longer)
        sides = (weight, grid.num_vocab, weight_units), (hidden, grid.num_tokens, hidden_units)
        if not self.vocab_outermost:
            sides = sides[::-1]
        (outer, outer_rows, outer_units), (inner, inner_rows, inner_units) = sides
        self.phases = [Phase(0, outer_rows, inner=True, outer=True)]
        sums: list[RowSum | None] = [None, None]
        if outer is not None:
            found = outer[:outer_rows]
            held = None if found.dtype != precision.wide or stashed else [found]
            sums[0] = RowSum(found, held, precision, buffers, unscale, outer_units)
        if inner is not None:
            found = inner[:inner_rows]
            held = [found]
            if found.dtype != precision.wide:
                size = inner_rows * found.shape[1] * precision.wide.itemsize
                needed = 2 * (inner_rows - len(inner) // 2)  # 16-bit rows; one too many if N = V is odd
                if outer is None or size <= spare_bytes or needed > len(outer):
                    held = [found.new_empty(found.shape, dtype=precision.wide)]
                else:
                    held = self._borrow(inner, outer, inner_rows, precision.wide)
            sums[1] = RowSum(found, held, precision, buffers, unscale, inner_units)
        self.weight, self.hidden = sums if self.vocab_outermost else sums[::-1]
        self.precision, self.buffers = precision, buffers
        self.first_waiting = 0  # token
        self.most_waiting = grid.tokens
        if self.vocab_outermost and weight is not None and weight.shape[1] > grid.tokens:
            longer_side = max(grid.vocab, weight.shape[1])
            tile_bytes = grid.tokens * longer_side * precision.gradient_operands.itemsize
            tiles = max(1, min(spare_bytes, _WAITING_BYTES) // tile_bytes)
            self.most_waiting = min(grid.num_tokens, tiles * grid.tokens)

    def _borrow(self, inner: Tensor, outer: Tensor, inner_rows: int, wide: torch.dtype) -> list[Tensor]:
        """Memory for `inner_rows` rows of sums; cuts the grid between its pieces, the walk into phases."""
        width, num_outer = inner.shape[1], self.phases[0].stop
        first = min(inner_rows, len(inner) // 2)
        row_bytes, rest = width * wide.itemsize, inner_rows - first
        own, lent = (part.view(-1).view(torch.uint8) for part in (inner, outer))
        start = (len(lent) - rest * row_bytes) // wide.itemsize * wide.itemsize
        pieces = own[: first * row_bytes], lent[start : start + rest * row_bytes]
        if self.vocab_outermost:
            self.grid = replace(self.grid, token_cuts=(*self.grid.token_cuts, first))
        else:
            self.grid = replace(self.grid, vocab_cuts=(first,))
        lent_row = start // (width * outer.element_size())
        split = next(
            (begin for begin, end in map(self._outer_span, self._walk()) if end > lent_row), num_outer
        )
        self.phases = [
            Phase(0, split, inner=True, outer=True),
            Phase(split, num_outer, inner=True, outer=False),
            Phase(split, num_outer, inner=False, outer=True),
        ]
        return [piece.view(wide).view(-1, width) for piece in pieces if len(piece)]

    def _walk(self) -> Iterator[Tile]:
        return self.grid.walk(vocab_outermost=self.vocab_outermost)

    def _outer_span(self, tile: Tile) -> tuple[int, int]:
        return (tile.v0, tile.v1) if self.vocab_outermost else (tile.n0, tile.n1)

    def walk(self) -> Iterator[tuple[Phase, Tile]]:
        """The tiles, in the order in which they must be added."""
        for phase in self.phases:
            for tile in self._walk():
                if phase.start <= self._outer_span(tile)[0] < phase.stop:
                    yield phase, tile

    def add(self, phase: Phase, tile: Tile, gradient: Tensor, hidden: Factor, weight: Factor) -> None:
        """Add the products of a tile of d loss / d raw product [n, v] that its phase asks for."""
        into_weight, into_hidden = phase.outer, phase.inner
        if not self.vocab_outermost:
            into_weight, into_hidden = into_hidden, into_weight
        waiting, operand = self._operands(tile, gradient)
        if self.hidden is not None and into_hidden:
            factor = weight.tile(tile.v0, tile.v1, operand.dtype)
            first, last = tile.first_in_row, tile.last_in_row
            self.hidden.add(tile.n0, tile.n1, operand, factor, first=first, last=last)
        if self.weight is not None and into_weight and waiting is not None:
            factor = hidden.tile(tile.n1 - len(waiting), tile.n1, operand.dtype)
            first, last = len(waiting) == tile.n1, tile.last_in_column
            self.weight.add(tile.v0, tile.v1, waiting.T, factor, first=first, last=last)

    def _operands(self, tile: Tile, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        """The tile as a factor of its products: of the weight's, and of hidden's.

        Where fewer tokens than the width make adding [v, D] to the weight's sums expensive, a 16-bit copy of
        the tile waits (None), as far as there is room, for a common product with those below it.
        """
        dtype = self.precision.gradient_operands
        if gradient.dtype == dtype or not self.vocab_outermost:
            operand = as_operand(gradient, self.precision, self.buffers)
            return operand, operand
        begin, end = tile.n0 - self.first_waiting, tile.n1 - self.first_waiting
        plane = self.buffers.take("operand", (self.most_waiting, gradient.shape[1]), dtype)
        operand = plane[begin:end].copy_(gradient)
        if not tile.last_in_column and end + self.grid.tokens <= self.most_waiting:
            return None, operand
        self.first_waiting = 0 if tile.last_in_column else tile.n1
        return plane[:end], operand


def _rows_of(num_bytes: int, tensor: Tensor) -> int:
    """How many rows of a tensor [R, D] take about so many bytes."""
    return max(1, num_bytes // max(1, tensor.shape[1] * tensor.element_size()))


def as_operand(gradient: Tensor, precision: Precision, buffers: Buffers) -> Tensor:
    """A tile of gradients [n, v] as a factor of the gradient products, copied only for another dtype."""
    dtype = precision.gradient_operands
    return (
        gradient
        if gradient.dtype == dtype
        else buffers.take("operand", gradient.shape, dtype).copy_(gradient)
    )


def divide_by_units_(sums: Tensor) -> Tensor:
    """Divide each row of float32 sums [R, D] by a power of two of its own, and give these units [R] back.

    A row's largest magnitude comes to [2^13, 2^14), in the midst of float16's range, so that the cast loses
    nothing of a row that waits for the factor, a GradScaler's say, which will bring it there. The unit is 1
    where a row is zero or not finite.
    """
    largest = torch.linalg.vector_norm(sums, torch.inf, dim=1)
    mantissa, _ = torch.frexp(largest)
    power = (largest / mantissa * 2.0**-14).clamp_(min=torch.finfo(sums.dtype).tiny)
    units = power.where(largest.isfinite() & (largest > 0), 1.0)
    sums.div_(units[:, None])
    return units


def scale_rows(slope: Tensor, upstream: Tensor, out: Tensor, units: Tensor | None = None) -> None:
    """Write slope [N, D] times upstream [N] to out [N, D], which may be slope, in blocks of rows.

    A slope in `units` [N] is multiplied by both in one step, so that it is rounded once. Where upstream is
    zero, so is the product: a NaN in a token without upstream gradient stays where it is.
    """
    for start in range(0, len(slope), WIDENED_ROWS):
        block = slice(start, start + WIDENED_ROWS)
        rows, factors, scaled = slope[block], upstream[block], out[block]
        if units is not None:
            factors = factors * units[block]
        torch.mul(rows, factors[:, None], out=scaled).masked_fill_((factors == 0)[:, None], 0.0)


def spread(values: Tensor, rows: Tensor, num_rows: int, fill: float = 0.0) -> Tensor:
    """The values of `rows` among all [num_rows]; `fill` elsewhere."""
    return values.new_full((num_rows,), fill).index_copy_(0, rows, values)


def spread_rows_(compact: Tensor, rows: Tensor) -> None:
    """Move the first len(rows) rows of compact [N, D] to positions `rows` (ascending); others become zero.

    Works in place, last block first: rows[i] >= i, so no block overwrites one that still has to move.
    """
    num_rows = len(rows)
    compact[num_rows:].zero_()
    block = _rows_of(_MOVED_BYTES, compact)
    for stop in range(num_rows, 0, -block):
        start = max(0, stop - block)
        moving = compact[start:stop].clone()
        compact[start:stop].zero_()
        compact[rows[start:stop]] = moving
