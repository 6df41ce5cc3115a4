"""Episodes and their lengths."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.plan.workload import Generation, Lengths, Training, Workload, lognormal_lengths, measured_lengths


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (Workload(episodes=0), "--episodes must be at least 1"),
        (Workload(steps=0), "--steps"),
        (Workload(turns=0), "--turns"),
        (Workload(tokens=-1), "--tokens must be at least 1, got -1"),
        (Workload(sampled=float("nan")), "--sampled must be a number from 1 to "),
        (Workload(tool_seconds=-1), "--tool-seconds must be at least 0, got -1"),
        (Workload(sampled=24_001), r"--sampled \(24001\) cannot be more than --tokens \(24000\)"),
        (Workload(prompt=20_000), "lower --prompt"),
        (Workload(zero_advantage=1.0), "--zero-advantage must be at most 0.999, got 1"),
        (Generation(batch=0), "--batch"),
        (Generation(context=0), "--context must be at least 1, got 0"),
        (Generation(busy=0), "--busy"),
        (Generation(kv_bits=7), "--kv-bits must be 16, 8 or 4"),  # type: ignore[arg-type]
        (Generation(kv_shrink=0), "--kv-shrink"),
        (Generation(allreduce_seconds=-1), "--allreduce-seconds"),
        (Training(mfu=1.1), "--mfu must be at most 1, got 1.1"),
        (Training(microbatch_tokens=0), "--microbatch-tokens"),
        (Training(sync_seconds=-1), "--sync-seconds"),
    ],
)
def test_impossible_settings_name_their_flag(part: Workload | Generation | Training, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        part.check()


def test_dynamic_sampling_plays_more_episodes() -> None:
    assert Workload(episodes=300, zero_advantage=0.25).generated_episodes == 400
    assert Workload(episodes=300, zero_advantage=0.25, dynamic_sampling=False).generated_episodes == 300


def test_cache_bytes_of_bits_and_shrink() -> None:
    assert Generation().kv_bytes_each == 2
    assert Generation(kv_bits=8).kv_bytes_each == 1
    assert Generation(kv_shrink=4).kv_bytes_each == 0.5


@settings(max_examples=40, deadline=None)
@given(cv=st.floats(0, 2), count=st.integers(1, 200))
def test_lognormal_lengths_average_to_one(cv: float, count: int) -> None:
    lengths = lognormal_lengths(cv, count)
    assert len(lengths.relative) == count
    assert sum(lengths.relative) / count == pytest.approx(1, rel=1e-9)
    assert 1 - 1e-9 <= lengths.squared_mean <= 1 + cv * cv + 1e-9  # equal shares cut the ends off


def test_lognormal_spread_comes_close() -> None:
    assert lognormal_lengths(0.5, 1000).squared_mean == pytest.approx(1.25, rel=0.01)


def test_measured_lengths_keep_the_longest() -> None:
    lengths = measured_lengths([30, 10, 20], 3)
    assert lengths.relative == (0.5, 1.0, 1.5)
    many = measured_lengths([1.0] * 99 + [10.0], 64)
    assert max(many.relative) / min(many.relative) == 10
    assert measured_lengths([5], 1).relative == (1.0,)


@pytest.mark.parametrize("relative", [(), (1.0, -1.0), (1.0, 2.0)])
def test_lengths_must_average_to_one(relative: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="relative lengths"):
        Lengths(relative)


def test_impossible_spreads() -> None:
    with pytest.raises(ValueError, match="cv >= 0"):
        lognormal_lengths(-0.1, 3)
    with pytest.raises(ValueError, match="at least one measured length"):
        measured_lengths([], 3)
