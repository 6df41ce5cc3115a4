"""The packing picture: stretches to scale, ticks at borders, wrong input refused."""

import re

import pytest

from agentrl.report.picture import PictureRow, packing_picture

ROW = PictureRow((("prompt", 3), ("action", 2), ("tool", 1), ("padding", 4)), (0, 5))


def test_stretches_stand_where_their_tokens_do() -> None:
    body = packing_picture("Rows", [("packed", [ROW, PictureRow((("action", 10),))])]).body
    rects = re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="\d+" fill="var\(--(\w+)\)"', body)
    assert rects == [
        ("0", "1", "3", "prompt"), ("3", "1", "2", "action"), ("5", "1", "1", "tool"),
        ("6", "1", "4", "padding"), ("0", "12", "10", "action"),
    ]  # fmt: skip
    assert 'd="M0 0v10M5 0v10"' in body
    assert body.count('class="tick"') == 1  # the second row has no border
    assert 'viewBox="0 0 10 ' in body
    assert "2 rows, 20 positions" in body


def test_layouts_are_to_one_scale_and_names_escaped() -> None:
    body = packing_picture("Rows", [("<a>", [ROW]), ("b", [PictureRow((("action", 2),))]), ("none", [])]).body
    assert body.count('viewBox="0 0 10 ') == 2
    assert "<a>" not in body
    assert "none" not in body.replace('preserveAspectRatio="none"', "")


def test_at_most_64_rows_are_drawn_and_it_says_so() -> None:
    body = packing_picture("Rows", [("packed", [ROW] * 70)]).body
    assert body.count("<rect") == 64 * 4
    assert "70 rows, 700 positions; the first 64 rows are drawn" in body


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        packing_picture("Rows", [("packed", [])])
    with pytest.raises(ValueError, match="no kind image; kinds are action, prompt, tool, padding"):
        packing_picture("Rows", [("packed", [PictureRow((("image", 1),))])])
