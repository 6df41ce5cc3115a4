"""Tiles of the head's [N, V] plane: their sizes, their factors in the right precision."""

# N tokens, V vocabulary, D width; n, v the sides of one tile

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from agentrl.ops.bfloat16_product import mm_float32_, multiplies_bfloat16

LogitPrecision = Literal["float32", "input"]

# A float32 tile of 1024 x 2048 stays in a CPU's caches and runs at the full matrix-product rate; a GPU needs
# 4096 x 4096 to give every multiprocessor several blocks.
CPU_TILE_BYTES = 8 << 20
CUDA_TILE_BYTES = 64 << 20
# Of the rows [n, D] of hidden that a tile copies on CPU: beside 8 MiB of tiles and sums, 16 MB allow no more.
_COPIED_BYTES = 6 << 20
# Rows taken at a time where PyTorch widens them in memory of its own.
WIDENED_ROWS = 128


@dataclass(frozen=True, slots=True)
class Precision:
    """Which dtype each step of the head runs in, given the inputs' dtype, their device and `logits=`."""

    inputs: torch.dtype
    device: torch.device
    logits: LogitPrecision

    @property
    def wide(self) -> torch.dtype:
        """Where sums, statistics and the tile itself live: float32, or float64 for float64 inputs."""
        return torch.float64 if self.inputs == torch.float64 else torch.float32

    @property
    def exact(self) -> torch.dtype:
        """Where a token's single numbers are computed: float64, or float32 on a device that has none."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    @property
    def narrow(self) -> bool:
        """Whether the inputs have 16 bits, so that gradients are summed in float32 and cast once."""
        return self.inputs in (torch.bfloat16, torch.float16)

    @property
    def native(self) -> bool:
        """Whether a product of bfloat16 factors is a float32 one on this CPU: neither widened nor rounded."""
        return self.inputs == torch.bfloat16 and self.device.type == "cpu" and multiplies_bfloat16()

    @property
    def logit_operands(self) -> torch.dtype:
        """The dtype of the factors of a logit. Where a 16-bit product cannot be written as float32, they are
        widened first, which is exact."""
        if not self.narrow or self.logits == "input" or self.device.type == "cuda":
            return self.inputs
        return self.inputs if self.native else self.wide

    @property
    def gradient_operands(self) -> torch.dtype:
        """The dtype of a gradient's factors: wide where those of a logit are, and so are at hand.

        On CPU, a float16 product could overflow its float16 result.
        """
        widen = self.inputs == torch.float16 and self.device.type != "cuda"
        return self.wide if widen or self.logit_operands == self.wide else self.inputs


def default_tile_bytes(precision: Precision, tiles_held: int, width: int, *, stashed: bool) -> int:
    """Bytes of one tile, such that all that is held at a time stays below 16 MB on CPU.

    Soft-cap, entropy and a temperature's gradient each hold a second tile, as do the float32 sums beside a
    stash; 16-bit inputs hold sums and 16-bit copies of the gradient beside it, and wide copies of their
    factors or, rounded, of logits, but for float32 logits of `native` products.
    """
    if precision.device.type == "cuda":
        return CUDA_TILE_BYTES // (tiles_held + stashed)
    if not precision.narrow:
        return CPU_TILE_BYTES // (tiles_held + stashed)
    copies = not precision.native or precision.logits == "input"
    eighths = 4 if not copies or width <= 256 else 3 if width <= 512 else 2
    return CPU_TILE_BYTES * eighths // 8 // tiles_held


def wide_product(lhs: Tensor, rhs: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """Write lhs @ rhs to `out` in the wide dtype, unrounded, or add it there.

    16-bit factors multiply so on CUDA, where they do not add, and on CPU where they are `native`.
    """
    if lhs.dtype == out.dtype:
        out.addmm_(lhs, rhs) if accumulate else torch.mm(lhs, rhs, out=out)
    elif out.device.type == "cpu":
        mm_float32_(out, lhs, rhs, accumulate=accumulate)
    else:
        assert not accumulate
        torch.mm(lhs, rhs, out_dtype=out.dtype, out=out)


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile: tokens [n0, n1) by vocabulary [v0, v1); first and last say whether it begins or ends a row
    (all vocabulary tiles of these tokens) or a column (all token tiles of this vocabulary)."""

    n0: int
    n1: int
    v0: int
    v1: int
    first_in_row: bool
    last_in_row: bool
    first_in_column: bool
    last_in_column: bool


@dataclass(frozen=True, slots=True)
class Grid:
    """How [num_tokens, vocabulary] is cut: `tokens` by `vocab` at most, in tiles of nearly equal size.

    No tile reaches across one of `token_cuts` or `vocab_cuts`.

    >>> float32 = Precision(torch.float32, torch.device("cpu"), "float32")
    >>> grid = Grid.fit(3000, 5000, 64, 4 << 20, float32)
    >>> grid.tokens, grid.vocab, len(list(grid.walk(vocab_outermost=True)))
    (1024, 1024, 15)
    """

    num_tokens: int
    num_vocab: int
    tokens: int
    vocab: int
    token_cuts: tuple[int, ...] = ()
    vocab_cuts: tuple[int, ...] = ()

    @staticmethod
    def fit(
        num_tokens: int,
        num_vocab: int,
        width: int,
        tile_bytes: int,
        precision: Precision,
        *,
        sums_apart: bool = False,
        token_cuts: tuple[int, ...] = (),
    ) -> "Grid":
        """The squarest tile of at most `tile_bytes`, longer along one side where the other is short.

        Copied factors, up to [n, D] of hidden and for 16-bit inputs [v, D] of the weight, stay about as small
        as the tile, and so do sums [v, D] of the weight's gradient that have memory of their own. 16-bit
        tiles of a wide weight have 7/4 as many columns as rows, all that the memory allows: a bfloat16
        product with more rows than columns may run on one thread.
        """
        cells = max(1, tile_bytes // precision.wide.itemsize)
        copied = cells if precision.narrow else 2 * cells
        if precision.device.type != "cuda":
            copied = min(copied, _COPIED_BYTES // precision.wide.itemsize)
        longest = min(num_tokens, max(1, copied // width))
        tokens = max(1, min(math.isqrt(cells), longest))
        widest = num_vocab
        if precision.narrow or sums_apart:
            widest = max(1, (7 * cells // 4 if precision.narrow else cells) // width)
        vocab = max(1, min(num_vocab, cells // tokens, widest))
        tokens = max(1, min(longest, cells // vocab))
        return Grid(num_tokens, num_vocab, tokens, _even(num_vocab, vocab), token_cuts)

    def walk(self, *, vocab_outermost: bool) -> Iterator[Tile]:
        """The tiles, column after column (vocabulary outermost) or row after row."""
        rows = _spans(self.num_tokens, self.tokens, self.token_cuts)
        columns = _spans(self.num_vocab, self.vocab, self.vocab_cuts)
        order = (
            ((*n, *v) for v in columns for n in rows)
            if vocab_outermost
            else ((*n, *v) for n in rows for v in columns)
        )
        for n0, n1, v0, v1 in order:
            yield Tile(n0, n1, v0, v1, v0 == 0, v1 == self.num_vocab, n0 == 0, n1 == self.num_tokens)


def _spans(total: int, at_most: int, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
    """[start, stop) of parts of nearly equal size, none across a cut."""
    found = []
    for start, stop in pairwise(sorted({0, *cuts, total})):
        size = _even(stop - start, at_most)
        found += [(part, min(part + size, stop)) for part in range(start, stop, size)]
    return found


def _even(total: int, at_most: int) -> int:
    """A part's size: parts nearly equal, none above `at_most`, so that no thin remainder is left over."""
    size = math.ceil(total / max(1, math.ceil(total / at_most)))
    aligned = math.ceil(size / 64) * 64  # whole vector registers and cache lines
    return max(1, aligned if aligned <= at_most else size)


@dataclass(slots=True)
class Buffers:
    """Memory that tiles reuse: one flat buffer of bytes a name."""

    device: torch.device
    flat: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor; it shares memory with the last one of this name."""
        size = math.prod(shape) * dtype.itemsize
        if name not in self.flat or self.flat[name].numel() < size:
            self.flat.pop(name, None)  # freed before the larger one is allocated
            self.flat[name] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self.flat[name][:size].view(dtype).view(*shape)


class Factor:
    """Rows of a factor [R, D] (hidden or weight), a tile at a time, selected and in the wanted dtype."""

    def __init__(self, name: str, source: Tensor, rows: Tensor | None, buffers: Buffers) -> None:
        self.name = name
        self.source = source
        self.rows = rows  # int64: which rows of the source take part; None means all
        self.buffers = buffers
        self.held: tuple[int, int, Tensor] | None = None  # the last copy: one at a time, in the same memory

    def tile(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Rows [start, stop) as `dtype`: a view of the source where nothing has to change."""
        if self.rows is None and dtype == self.source.dtype:
            return self.source[start:stop]
        if self.held is not None and self.held[:2] == (start, stop) and self.held[2].dtype == dtype:
            return self.held[2]
        self.held = None  # may be the last to keep a smaller buffer alive
        out = self.buffers.take(self.name, (stop - start, self.source.shape[1]), dtype)
        if self.rows is None:
            out.copy_(self.source[start:stop])
        elif dtype == self.source.dtype:
            torch.index_select(self.source, 0, self.rows[start:stop], out=out)
        else:
            parts = (part.split(WIDENED_ROWS) for part in (out, self.rows[start:stop]))
            for some, rows in zip(*parts, strict=True):
                some.copy_(self.source.index_select(0, rows))
        self.held = start, stop, out
        return out
