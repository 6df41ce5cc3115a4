"""What the benchmark on the gym makes of its runs: kept through a crash, summed up as it says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentrl as arl
import curriculum_bugfix as bench


def run_of(config: Any, arm: str, seed: int, rates: list[float], episodes: list[int]) -> dict[str, Any]:
    spent = np.cumsum([0, *episodes]).tolist()
    return {
        "arm": arm,
        "seed": seed,
        "settings": config.settings(),
        "episodes": episodes,
        "zero_adv_frac": [0.25] * len(episodes),
        "evaluations": [list(point) for point in zip(spent, rates, strict=True)],
        "seconds": 1.0,
        "commit": "abc",
        "torch": "2",
        "machine": "m",
    }


def test_a_line_that_a_crash_cut_off_is_played_again(tmp_path: Path) -> None:
    config = bench.Config(results=tmp_path / "runs.jsonl")
    runs = [run_of(config, "uniform", seed, [0.1, 0.5], [64]) for seed in range(3)]
    for cut in range(1, len(json.dumps(runs[1]))):
        config.results.unlink(missing_ok=True)
        bench.append(config.results, runs[0])
        with config.results.open("a") as file:
            file.write(json.dumps(runs[1])[:cut])
        assert bench.read(config) == {("uniform", 0): runs[0]}
        bench.append(config.results, runs[2])
        assert bench.read(config) == {("uniform", 0): runs[0], ("uniform", 2): runs[2]}
    with config.results.open("a") as file:
        file.write(json.dumps(runs[1]))  # all but the end of its line
    assert set(bench.read(config)) == {("uniform", 0), ("uniform", 1), ("uniform", 2)}


def test_runs_with_other_settings_are_left_out(tmp_path: Path) -> None:
    config = bench.Config(results=tmp_path / "runs.jsonl")
    other = bench.Config(results=config.results, rl=arl.RLConfig(lr=1e-3))
    bench.append(config.results, run_of(other, "uniform", 0, [0.1, 0.5], [64]))
    assert bench.read(config) == {}
    assert len(bench.read(other)) == 1
    # The seed is the run's own, not a setting.
    assert bench.Config(rl=arl.RLConfig(seed=5)).settings() == bench.Config().settings()


def test_waste_counts_episodes_not_steps() -> None:
    run = {"zero_adv_frac": [1.0, 0.0, 0.5, 0.5, 0.0, 0.0], "episodes": [10, 30, 10, 10, 5, 5]}
    assert bench.thirds(run) == [0.25, 0.5, 0.0]
    assert bench.wasted(run) == 20


def test_a_rising_curve_pools_what_falls() -> None:
    rates, weights = np.array([0.1, 0.4, 0.2, 0.5, 0.3]), np.array([1.0, 1, 3, 1, 1])
    np.testing.assert_allclose(bench.rising(rates, weights), [0.1, 0.25, 0.25, 0.4, 0.4], rtol=1e-15)
    best = bench.rising(rates, weights)
    rng = np.random.default_rng(0)
    error = (weights * (best - rates) ** 2).sum()
    for _ in range(500):  # no rising curve is nearer
        other = np.sort(best + 0.05 * rng.standard_normal(5))
        assert (weights * (other - rates) ** 2).sum() >= error


def test_episodes_to_a_level() -> None:
    curves = np.array([[[0, 0.1], [100, 0.3], [200, 0.7]], [[0, 0.1], [200, 0.5], [400, 0.5]]])
    weights = np.array([16, 16, 64])
    assert bench.episodes_to(0.4, curves, weights) == pytest.approx(150)
    assert bench.episodes_to(0.25, curves, weights) == pytest.approx(75)
    assert bench.episodes_to(0.6, curves, weights) == pytest.approx(300)  # the mean curve's own end
    assert bench.episodes_to(0.61, curves, weights) == float("inf")
    assert bench.episodes_to(0.1, curves, weights) == 0


def test_a_lucky_evaluation_does_not_reach_a_level() -> None:
    lucky = np.array([[[0, 0.1], [100, 0.5], [200, 0.2], [300, 0.5]]])
    assert bench.episodes_to(0.5, lucky, np.array([16, 16, 16, 64])) == pytest.approx(300)


def test_the_bootstrap_interval_of_eight_seeds_holds_the_mean_as_often_as_the_report_says() -> None:
    # 4,000 normal samples: standard error .5 points.
    rng, draws = np.random.default_rng(0), bench.resampled(8)[:1000]
    intervals = [bench.interval(rng.standard_normal(8)[draws].mean(1)) for _ in range(4_000)]
    assert np.mean([low <= 0 <= high for low, high in intervals]) == pytest.approx(0.89, abs=0.015)


def test_the_report_is_two_tables_on_shared_seeds(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "NUM_BOOTSTRAP", 200)
    config = bench.Config(results=tmp_path / "runs.jsonl", steps=2)
    for seed in (0, 1):
        rise = 0.1 * seed
        bench.append(config.results, run_of(config, "uniform", seed, [0.1, 0.4, 0.6 + rise], [64, 64]))
        bench.append(config.results, run_of(config, "default", seed, [0.1, 0.7 + rise, 0.8], [64, 64]))
        bench.append(config.results, run_of(config, "band", seed, [0.1, 0.4, 0.5], [48, 16]))
        bench.append(config.results, run_of(config, "band-window", seed, [0.1, 0.4, 0.6], [48, 32]))
    bench.append(config.results, run_of(config, "default", 7, [0.0, 0.0, 0.0], [64, 64]))
    bench.report(config)
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {7}
    assert "| all tasks | 2 | 128 (128 to 128) | 0.25, 0.25, 0.00 | 25% | 0.650 [0.600, 0.700] |" in rows
    assert (
        "| the default: top | 3 | 128 (128 to 128) | 0.25, 0.25, 0.00 | 25% | 0.533 [0.000, 0.800] |" in rows
    )
    # seed 7 has no uniform run: .8 - .65; at 64 episodes .75 - .65; .65 at (.65 - .1) / (.75 - .1) of 64.
    (row,) = (row for row in rows if row.startswith("| the default: top | 2 |"))
    assert "| +0.150 [+0.100, +0.200] (+3.0 SE) | +0.100 [+0.100, +0.100] (+2.0 SE) | 54 [" in row
    assert row.endswith("| 42% |")
    assert "held-out +0.100 [+0.100, +0.100], +25% episodes." in text
    assert "the chapter: all tasks" in text
