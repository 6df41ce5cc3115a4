"""The page: self-contained, for light and dark, with every text escaped."""

import re

import pytest

from agentrl.report.figures import Part, stacked_bars
from agentrl.report.html import Section, Table, render_page


def page() -> str:
    table = Table(("name", "value"), (("<a>", "1"), ("b", "2")), frozenset({1}))
    figure = stacked_bars("Bars", [Part("p", "action")], [("one", [1.0])], unit="GB", caption="a & b")
    section = Section(heading="Cost & more", paragraphs=("x < y",), tables=(table,), figures=(figure,))
    return render_page("Plan", [section], lead="lead")


def test_everything_is_there_and_escaped() -> None:
    text = page()
    for piece in (
        "<h1>Plan</h1>",
        "Cost &amp; more",
        "x &lt; y",
        "&lt;a&gt;",
        "a &amp; b",
        'class="segment"',
    ):
        assert piece in text
    assert text.count('class="number"') == 3  # one heading and two cells


def test_the_page_needs_nothing_else() -> None:
    text = page()
    assert not re.search(r"<script|<link|<img|@import|url\(|https?:", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_light_and_dark_have_the_same_colours() -> None:
    light, dark = re.findall(r":root \{(.*?)\}", page(), flags=re.S)
    names = [set(re.findall(r"--([\w]+):", part)) for part in (light, dark)]
    assert names[0] == names[1] >= {"action", "prompt", "tool", "padding", "c1", "c7", "ink", "page"}
    used = set(re.findall(r"var\(--([\w]+)\)", page()))
    assert used <= names[0]


def test_rows_fit_their_columns() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table(("a", "b"), (("x",),))
