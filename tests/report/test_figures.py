"""Figures: widths and points are to scale, text is escaped, wrong input is refused."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.report.figures import Line, Part, line_chart, nice_ticks, stacked_bars

PARTS = [Part("weights", "c1"), Part("cache", "c2")]


def widths(body: str) -> list[float]:
    return [float(x) for x in re.findall(r"width:([\d.]+)%", body)]


def test_bars_are_to_one_scale() -> None:
    body = stacked_bars("Memory", PARTS, [("a", [1, 3]), ("b", [8, 0])], unit="GB", limit=("full", 10.0)).body
    assert widths(body) == [10.0, 30.0, 80.0]  # nothing is drawn for zero
    assert body.count('class="limit" style="left:100.000%"') == 2
    assert "4.0 GB" in body
    assert "weights: 1.0 GB" in body
    assert "a: weights 1.0; cache 3.0 GB" in body


def test_text_is_escaped() -> None:
    body = stacked_bars("t", [Part("<b>", "c1")], [('"q"', [1])], unit="<i>").body
    assert "<b>" not in body
    assert "<i>" not in body
    assert "&quot;q&quot;" in body


@pytest.mark.parametrize(("values", "says"), [([1.0], "1 values for 2 parts"), ([1.0, -1.0], "at least 0"),
                                              ([1.0, float("nan")], "finite")])  # fmt: skip
def test_bars_that_cannot_be_drawn(values: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        stacked_bars("t", PARTS, [("a", values)], unit="GB")


def test_all_zero_bars_are_drawn() -> None:
    assert widths(stacked_bars("t", PARTS, [("a", [0, 0])], unit="GB").body) == []
    assert stacked_bars("t", PARTS, [], unit="GB").body


def test_lines_break_at_gaps() -> None:
    mean = Line("mean", (0.0, 1.0, None, 0.5, float("nan")), "action")
    body = line_chart("Reward", [0, 1, 2, 3, 4], [mean], x_label="step", y_label="reward").body
    runs = re.findall(r'points="([^"]*)"', body)
    assert [len(run.split()) for run in runs] == [2, 1]
    assert body.count("<circle") == 1  # a point alone is seen
    assert runs[0].split()[0] == "46.0,158.0"  # smallest x, smallest y: the lower left corner
    assert "var(--action)" in body


@pytest.mark.parametrize(
    ("x", "values", "says"), [([0.0], (1.0, 2.0), "2 values for 1"), ([0.0], (None,), "nothing to draw")]
)
def test_lines_that_cannot_be_drawn(x: list[float], values: tuple[float | None, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        line_chart("t", x, [Line("l", values, "c1")], x_label="x", y_label="y")


@settings(max_examples=100, deadline=None)
@given(low=st.floats(-1e6, 1e6), span=st.floats(0, 1e6))
@example(low=0.0, span=5e-324)
@example(low=0.0, span=1e-199)
def test_ticks_span_the_range(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    slack = 1e-6 * max(abs(low), span)
    assert 2 <= len(ticks) <= 6
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack
    assert ticks == sorted(set(ticks))
