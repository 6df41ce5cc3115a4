"""The packing picture: rows of a batch, each token a stretch of its row, coloured by what it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from agentrl.report.figures import Color, Figure

# What a stretch of a row can be, in the order of the legend.
KINDS: dict[str, tuple[str, Color]] = {
    "action": ("action tokens", "action"),
    "prompt": ("prompt", "prompt"),
    "tool": ("tool tokens", "tool"),
    "padding": ("padding", "padding"),
}
_MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class PictureRow:
    """A row as runs of (kind, number of tokens), and the positions where a sequence or a branch begins."""

    runs: tuple[tuple[str, int], ...]
    borders: tuple[int, ...] = ()

    @property
    def num_positions(self) -> int:
        """Positions of the row, padding included."""
        return sum(length for _, length in self.runs)


def packing_picture(
    title: str, layouts: Sequence[tuple[str, Sequence[PictureRow]]], *, caption: str = ""
) -> Figure:
    """Rows under a heading for each layout (name, rows), all to one scale, with a tick at each border.

    At most 64 rows of a layout are drawn, and the heading says so. Raises ValueError for a kind that is not
    one of KINDS, or where no layout has a row.

    >>> row = PictureRow((("prompt", 3), ("action", 2)), (0,))
    >>> "5 positions" in packing_picture("Rows", [("packed", [row])]).body
    True
    """
    every_row = [row for _, rows in layouts for row in rows]
    width = max((row.num_positions for row in every_row), default=0)
    if width == 0:
        raise ValueError(f"figure {title!r} has nothing to draw")
    unknown = {kind for row in every_row for kind, _ in row.runs} - KINDS.keys()
    if unknown:
        raise ValueError(f"no kind {', '.join(sorted(unknown))}; kinds are {', '.join(KINDS)}")
    legend = "".join(
        f'<li><span class="swatch" style="background:var(--{color})"></span>{name}</li>'
        for name, color in KINDS.values()
    )
    tick = '<li><span class="swatch limit-swatch"></span>a sequence or a branch begins</li>'
    parts = [_layout(name, rows, width) for name, rows in layouts if rows]
    return Figure(title, f'<ul class="legend">{legend}{tick}</ul>' + "".join(parts), caption)


def _layout(name: str, rows: Sequence[PictureRow], width: int) -> str:
    drawn = rows[:_MOST_ROWS]
    thick, pitch = (8, 11) if len(drawn) <= 16 else (5, 7)
    marks: list[str] = []
    for index, row in enumerate(drawn):
        top, place = index * pitch + 1, 0
        for kind, length in row.runs:
            color = KINDS[kind][1]
            marks.append(
                f'<rect x="{place}" y="{top}" width="{length}" height="{thick}" fill="var(--{color})"/>'
            )
            place += length
        ticks = "".join(f"M{border} {top - 1}v{thick + 2}" for border in row.borders)
        marks.append(f'<path class="tick" d="{ticks}"/>' if ticks else "")
    positions = sum(row.num_positions for row in rows)
    text = f"{len(rows):,} rows, {positions:,} positions"
    if len(rows) > len(drawn):
        text += f"; the first {len(drawn)} rows are drawn"
    height = len(drawn) * pitch + 1
    return (
        f'<div class="bar-label"><span>{escape(name)}</span><span>{text}</span></div>'
        f'<svg class="rows" viewBox="0 0 {width} {height}" preserveAspectRatio="none" '
        f'style="height:{height}px" '
        f'role="img" aria-label="{escape(f"{name}: {text}")}">{"".join(marks)}</svg>'
    )
