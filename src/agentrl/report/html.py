"""One self-contained page: headings, paragraphs, tables and figures; light and dark, wide and narrow."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from agentrl.report.figures import Figure

_TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and rows of text; `numbers` are the columns to set as figures, right-aligned.

    Raises ValueError where a row has not one cell for each column.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"row {row} has {len(row)} cells for {len(self.columns)} columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, and under it paragraphs, tables and figures, in that order."""

    heading: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()


def render_page(
    title: str, sections: Sequence[Section], lead: str = "", refresh_seconds: float | None = None
) -> str:
    """The page as HTML text. Every text is escaped; only the bodies of figures are taken as they are.

    With `refresh_seconds` a browser that shows it loads it anew that often.

    >>> "a &lt; b" in render_page("a < b", [])
    True
    """
    source = _TEMPLATE.read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
    return template.render(title=title, lead=lead, refresh=refresh_seconds, sections=list(sections))
