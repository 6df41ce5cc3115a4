"""Figures keep to their ranges, and every range names its field."""

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.plan.engine import EngineConstants
from agentrl.plan.hours import Plan
from agentrl.plan.inputs import Range, ranges_of, read_text
from agentrl.plan.workload import Generation, Training, Workload


@given(value=st.floats() | st.integers())
def test_a_range_takes_what_lies_in_it_and_nothing_else(value: float) -> None:
    wanted = Range(0.5, 1e6, "tokens")
    if 0.5 <= value <= 1e6:
        wanted.check("--tokens", value)
        assert wanted.clamp(value) == value
        return
    with pytest.raises(ValueError, match=r"^--tokens must be .+, got .+$") as caught:
        wanted.check("--tokens", value)
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize("owner", [Workload, Generation, Training, EngineConstants, Plan])
def test_every_number_has_a_range(owner: type) -> None:
    numbers = {f.name for f in fields(owner) if "Range" in str(f.type) or f.type in (int, float)}
    assert set(ranges_of(owner)) == numbers
    assert all(wanted.unit for wanted in ranges_of(owner).values())


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"a = 1\n\xff")
    with pytest.raises(ValueError, match=r"x\.toml is not a UTF-8 text file: byte 6 is not text"):
        read_text(path)
