"""Exponentials of logits that wait for backward in the memory where the weight's gradient will be written."""

# N tokens, V vocabulary, D width; n, v the sides of one tile

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.ops.head_inputs import HeadInputs
from agentrl.ops.tiles import Buffers, Grid, Tile

# A tile of fewer tokens reads the weight for too little: below, tokens beyond the first D are not kept.
_FEWEST_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Stash:
    """exp(z - maximum) of the first tokens, until the weight's gradient overwrites them.

    The gradient [V, D] is written column by column of tiles, each after the column's last tile was read;
    until then its memory holds one number a logit for D tokens. `reserve` can add memory for tokens after
    those.
    Within a column of tiles the kept tokens follow each other, so that any of them can be read back.
    """

    weight_gradient: Tensor  # [V, D]
    grid: Grid  # cuts tokens where an area ends, and stays that of `tokens`
    areas: tuple[Tensor, ...]  # flat, for the tokens up to each cut
    starts: tuple[int, ...]  # the first token of each area
    maxima: Tensor  # [columns of tiles, kept tokens]: what a tile's logits were reduced by, less log(gain)
    gain: float  # float16 keeps exponentials times 2^15: it would drop what lies 17 nats below the maximum
    tokens: Tensor | None = None  # int64, ascending: those of interest; None means all

    @staticmethod
    def reserve(inputs: HeadInputs, num_tokens: int, extra_bytes: int = 0) -> "Stash":
        """Memory for the first D of `num_tokens` tokens, and for those after them that fit `extra_bytes`."""
        weight, settings = inputs.weight, inputs.settings
        gradient = torch.empty_like(weight, memory_format=torch.contiguous_format)
        num_vocab, width = weight.shape
        first = min(num_tokens, width)
        extra = min(num_tokens - first, extra_bytes // (num_vocab * weight.element_size()))
        extra = extra if extra >= min(_FEWEST_TOKENS, num_tokens - first) else 0
        areas, starts, cuts = (gradient.view(-1),), (0,), (first,)
        if extra:
            areas, starts = (*areas, weight.new_empty(num_vocab * extra)), (0, first)
            cuts = (first, first + extra)
        grid = Grid.fit(
            num_tokens, num_vocab, width, settings.tile_bytes, settings.precision,
            sums_apart=True, token_cuts=cuts,
        )  # fmt: skip
        columns = -(-num_vocab // grid.vocab)
        maxima = torch.empty(columns, cuts[-1], dtype=settings.precision.wide, device=weight.device)
        gain = 2.0**15 if weight.dtype == torch.float16 else 1.0
        return Stash(gradient, grid, areas, starts, maxima, gain)

    def select(self, tokens: Tensor) -> "Stash":
        """The same memory, read for `tokens` (int64, ascending) of the tokens it was reserved for."""
        cuts = tuple(torch.searchsorted(tokens, tokens.new_tensor(self.grid.token_cuts)).tolist())
        grid = replace(self.grid, num_tokens=len(tokens), token_cuts=cuts)
        return replace(self, grid=grid, tokens=tokens)

    def keep(self, tile: Tile, exp: Tensor, maximum: Tensor) -> None:
        """Store a tile of exp(z - maximum), which is lost, if it has a place."""
        area = self._area(tile)
        if area is not None:
            kept = self._column(area, tile)[tile.n0 - self.starts[area] : tile.n1 - self.starts[area]]
            kept.copy_(exp if self.gain == 1.0 else exp.mul_(self.gain))
            reduced = maximum[tile.n0 : tile.n1] - math.log(self.gain)
            self.maxima[tile.v0 // self.grid.vocab, tile.n0 : tile.n1] = reduced

    def held(self, tile: Tile, buffers: Buffers) -> tuple[Tensor, Tensor] | None:
        """A tile's exp(z - m) [n, v] and m [n, 1], the maximum less log(gain); None where it has no place."""
        area = self._area(tile)
        if area is None:
            return None
        column, maxima = self._column(area, tile), self.maxima[tile.v0 // self.grid.vocab, :, None]
        start = self.starts[area]
        if self.tokens is None:
            return column[tile.n0 - start : tile.n1 - start], maxima[tile.n0 : tile.n1]
        tokens = self.tokens[tile.n0 : tile.n1]
        # into memory that the tile's gradient takes next
        name = "tile" if column.dtype == self.maxima.dtype else "narrow"
        out = buffers.take(name, (len(tokens), column.shape[1]), column.dtype)
        return torch.index_select(column, 0, tokens - start, out=out), maxima.index_select(0, tokens)

    def _area(self, tile: Tile) -> int | None:
        ends = enumerate(self.grid.token_cuts)
        return next((area for area, end in ends if tile.n1 <= end), None)

    def _column(self, area: int, tile: Tile) -> Tensor:
        """All kept exponentials of an area in a tile's column [tokens, v]."""
        memory = self.areas[area]
        tokens = len(memory) // self.grid.num_vocab
        width = tile.v1 - tile.v0
        return memory[tile.v0 * tokens :][: tokens * width].view(tokens, width)
