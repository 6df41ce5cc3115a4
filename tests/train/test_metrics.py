"""Records of a run, and their truncation to a checkpoint."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.train.metrics import Max, Mean, MetricsLog


def filled(path: Path, steps: int) -> MetricsLog:
    log = MetricsLog(path / "metrics.jsonl")
    for step in range(1, steps + 1):
        log.append({"step": step, "x": step / 3})
    return log


@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_truncation_keeps_the_first_steps_byte_for_byte(tmp_path: Path, step: int) -> None:
    log = filled(tmp_path, 5)
    lines = log.path.read_bytes().splitlines(keepends=True)
    assert log.truncate(step) == log.read()
    assert log.path.read_bytes() == b"".join(lines[:step])
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 200))
def test_a_line_that_a_crash_cut_off_is_no_record(
    tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    log = filled(tmp_path_factory.mktemp("log"), 5)
    content = log.path.read_bytes()[:size]
    log.path.write_bytes(content)
    assert [record["step"] for record in log.read()] == list(range(1, content.count(b"\n") + 1))


def test_each_append_is_on_file_at_once(tmp_path: Path) -> None:
    log = filled(tmp_path, 1)
    assert log.read() == [{"step": 1, "x": 1 / 3}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.append({"step": 2, "x": float("nan")})
    assert len(log.read()) == 1


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.read() == log.truncate(0) == []
    with pytest.raises(ValueError, match="does not hold steps 1 to 2"):
        log.truncate(2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ["no", "[1]", '{"x": 1}', '{"step": "1"}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    log = filled(tmp_path, 2)
    log.path.write_text(log.path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="line 3"):
        log.read()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-99, 99), max_size=5), max_size=5))
def test_parts_add_up_exactly(parts: list[list[int]]) -> None:
    whole = [value for part in parts for value in part]
    mean = sum((Mean(sum(part), len(part)) for part in parts), Mean())
    assert mean.value == (sum(whole) / len(whole) if whole else None)
    highest = sum((Max(max(part, default=Max().highest)) for part in parts), Max())
    assert highest.value == max(whole, default=None)
