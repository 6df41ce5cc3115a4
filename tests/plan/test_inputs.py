"""Figures keep to their ranges, and every range names its field."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.plan.configs import find_model
from agentrl.plan.engine import VLLM_0_30_0, EngineConstants, constants_from_toml
from agentrl.plan.gpus import load_gpus
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


def constants_of(path: str) -> object:
    return constants_from_toml(read_text(path), path)


@pytest.mark.parametrize("reader", [find_model, load_gpus, constants_of])
@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5_000])
def test_a_file_too_deep_or_with_a_number_too_long_is_named(
    reader: Callable[[str], object], value: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"a": {value}' if reader is find_model else f"a = {value}")
    with pytest.raises(ValueError, match=r"config\.json is not (JSON|TOML): "):
        reader(str(path))


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\x1b[31m"])
def test_a_name_that_would_break_a_line_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "gpus.toml"
    quoted = name.replace("\n", "\\n").replace("\x1b", "\\u001b")
    path.write_text(f'["{quoted}"]\nbf16_tflops = 1\nbandwidth_gbs = 2\nmemory_mib = 3\n')
    with pytest.raises(ValueError, match="must be printable text") as caught:
        load_gpus(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="must be printable text"):
        replace(VLLM_0_30_0, name=name)
