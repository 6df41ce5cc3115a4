"""Figures as HTML and SVG that need nothing else: no script, no font, no image; colours follow light and
dark."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Roles, not hues: the page's style sheet gives each one a colour for light and one for dark.
# Tokens: action blue, prompt and tool aqua, padding grey. The numbered ones tell the parts of a whole apart.
Color = Literal["action", "prompt", "tool", "padding", "c1", "c2", "c3", "c4", "c5", "c6", "c7"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure ready for a page: `body` is HTML, every text in it escaped."""

    title: str
    body: str
    caption: str = ""
    wide: bool = True  # takes the page's width; two others stand side by side where there is room


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of segment of a stacked bar, the same in every bar."""

    name: str
    color: Color


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a line figure; None leaves a gap. `values` has an entry for each x."""

    name: str
    values: tuple[float | None, ...]
    color: Color
    x: tuple[float, ...] | None = None  # where its values stand, if not at the figure's x
    dots: bool = False  # mark each value, as where there are few


def stacked_bars(
    title: str,
    parts: Sequence[Part],
    bars: Sequence[tuple[str, Sequence[float]]],
    *,
    unit: str,
    digits: int = 1,
    limit: tuple[str, float] | None = None,
    caption: str = "",
) -> Figure:
    """Horizontal bars of parts, all to one scale, each with its total; `limit` draws one line across them.

    `bars` are (label, one value a part). Raises ValueError where a value is negative or not finite, or their
    number is not that of the parts.

    >>> figure = stacked_bars("Memory", [Part("weights", "c1")], [("one GPU", [2.0])], unit="GB")
    >>> "2.0 GB" in figure.body
    True
    """
    for label, values in bars:
        if len(values) != len(parts):
            raise ValueError(f"bar {label!r} has {len(values)} values for {len(parts)} parts")
        if any(not (math.isfinite(value) and value >= 0) for value in values):
            raise ValueError(f"bar {label!r} needs finite values of at least 0, got {list(values)}")
    longest = max([sum(values) for _, values in bars] + [limit[1] if limit else 0.0], default=0.0) or 1.0
    legend = _legend([(part.name, part.color) for part in parts])
    rows: list[str] = []
    for label, values in bars:
        segments = "".join(
            f'<span class="segment" style="width:{100 * value / longest:.3f}%;'
            f'background:var(--{part.color})" '
            f'title="{html.escape(f"{part.name}: {value:,.{digits}f} {unit}")}"></span>'
            for part, value in zip(parts, values, strict=True)
            if value > 0
        )
        text = "; ".join(f"{p.name} {v:,.{digits}f}" for p, v in zip(parts, values, strict=True))
        mark = f'<span class="limit" style="left:{100 * limit[1] / longest:.3f}%"></span>' if limit else ""
        rows.append(
            f'<div class="bar"><div class="bar-label"><span>{html.escape(label)}</span>'
            f"<span>{sum(values):,.{digits}f} {html.escape(unit)}</span></div>"
            f'<div class="track" role="img" aria-label="{html.escape(f"{label}: {text} {unit}")}">'
            f"{segments}{mark}</div></div>"
        )
    note = f'<li><span class="swatch limit-swatch"></span>{html.escape(limit[0])}</li>' if limit else ""
    return Figure(title, f'<ul class="legend">{legend}{note}</ul>' + "".join(rows), caption)


def line_chart(
    title: str,
    x: Sequence[float],
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    span: tuple[float, float] | None = None,
    caption: str = "",
) -> Figure:
    """Lines over x, on one axis that starts at the smallest value (at zero where that is near).

    `span` is what the axis shows at least.

    Raises ValueError where a line has not one value for each x, or nothing can be drawn.

    >>> mean = Line("mean", (0.1, 0.4), "action")
    >>> "<svg" in line_chart("Reward", [0, 1], [mean], x_label="step", y_label="reward").body
    True
    """
    for line in lines:
        places = x if line.x is None else line.x
        if len(line.values) != len(places):
            raise ValueError(f"line {line.name!r} has {len(line.values)} values for {len(places)} positions")
    present = [v for line in lines for v in line.values if v is not None and math.isfinite(v)]
    every_x = [*x, *(px for line in lines for px in line.x or ())]
    if not present or not every_x:
        raise ValueError(f"figure {title!r} has nothing to draw")
    ticks = nice_ticks(min([*present, *(span or ())]), max([*present, *(span or ())]))
    low, high = ticks[0], ticks[-1]
    left, top, width, height = 46.0, 8.0, 304.0, 150.0
    first, last = min(every_x), max(every_x)
    x_range = (last - first) or 1.0

    def at(px: float, py: float) -> str:
        down = 1 - (py - low) / (high - low)
        return f"{left + width * (px - first) / x_range:.1f},{top + height * down:.1f}"

    grid = "".join(
        f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{left - 5}" y="{y + 3:.1f}" text-anchor="end">{tick:,.6g}</text>'
        for tick in ticks
        for y in [top + height * (1 - (tick - low) / (high - low))]
    )
    paths: list[str] = []
    for line in lines:
        for run in _runs(x if line.x is None else line.x, line.values):
            color = f'stroke="var(--{line.color})"'
            points = " ".join(at(px, py) for px, py in run)
            if line.dots or len(run) == 1:
                for cx, cy in (point.split(",") for point in points.split()):
                    paths.append(f'<circle cx="{cx}" cy="{cy}" r="2.5" fill="var(--{line.color})"/>')
            paths.append(f'<polyline class="line" points="{points}" {color}/>')
    ends = (
        f'<text x="{left}" y="{top + height + 14}">{first:,.6g}</text>'
        f'<text x="{left + width}" y="{top + height + 14}" text-anchor="end">{last:,.6g}</text>'
        f'<text x="{left + width / 2}" y="{top + height + 14}" text-anchor="middle">'
        f"{html.escape(x_label)}</text>"
    )
    legend = _legend([(line.name, line.color) for line in lines])
    described = html.escape(f"{title}: {y_label} over {x_label}")
    svg = f'<svg viewBox="0 0 360 180" role="img" aria-label="{described}">{grid}{"".join(paths)}{ends}</svg>'
    axis = f'<p class="axis">{html.escape(y_label)}</p>'
    return Figure(title, f'<ul class="legend">{legend}</ul>{axis}{svg}', caption, wide=False)


def _legend(entries: Sequence[tuple[str, Color]]) -> str:
    return "".join(
        f'<li><span class="swatch" style="background:var(--{color})"></span>{html.escape(name)}</li>'
        for name, color in entries
    )


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` round numbers that span [low, high]; zero is among them where low is near it.

    >>> nice_ticks(0.1, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> nice_ticks(5.0, 5.0)
    [4.0, 5.0, 6.0]
    """
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-200):  # nothing to tell apart
        return [low - 1, low, low + 1]
    if 0 < low < 0.5 * high:
        low = 0.0
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10, 20, 50):
        first, last = math.floor(low / (step * factor) + 1e-9), math.ceil(high / (step * factor) - 1e-9)
        if last - first + 1 <= most:
            return [float(f"{i * step * factor:.12g}") for i in range(first, last + 1)]
    raise AssertionError("a factor of 50 spans any range")


def _runs(x: Sequence[float], values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for px, py in zip(x, values, strict=True):
        if py is not None and math.isfinite(py):
            runs[-1].append((px, py))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
