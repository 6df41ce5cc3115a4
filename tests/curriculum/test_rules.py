"""Each rule against what its name promises."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.curriculum.pass_rate import BetaPosterior, FloatArray
from agentrl.curriculum.rules import RULES, View, allocate, band, pools, proportional, skip, thompson, top
from agentrl.curriculum.sampler import TaskSampler


def view_of(mean: FloatArray, num_slots: int, **changes: Any) -> View:
    size = mean.size
    fields: dict[str, Any] = {
        "mean": mean,
        "signal": mean * (1 - mean),
        "inside": (mean > 0) & (mean < 1),
        "below": mean <= 0,
        "visited": np.ones(size, np.bool_),
        "waited": np.full(size, 1000),
        "num_certain": np.zeros(size, np.int64),
        "revisit": 0.1,
        "headroom": 0.0,
        "rested": 0.65,
        "draw": lambda rng: rng.random(size),
    }
    return View(num_slots=num_slots, **(fields | changes))


def chosen(priority: FloatArray, num_slots: int) -> list[int]:
    order = np.argsort(-priority)[:num_slots]
    return [int(i) for i in order if priority[i] > -np.inf]


def test_top_takes_the_largest_signal() -> None:
    view = view_of(np.array([0.1, 0.5, 0.9, 0.45, 0.05]), 3)
    assert chosen(top(view, np.random.default_rng(0)), 3)[:2] == [1, 3]


def test_headroom_prefers_the_failing_of_two_equal_signals_and_no_more() -> None:
    view = view_of(np.array([0.9, 0.1, 0.5]), 3, headroom=0.25)
    assert chosen(top(view, np.random.default_rng(0)), 3) == [2, 1, 0]


def test_rest_rotates_only_where_tasks_are_many() -> None:
    for size, rests in ((20, False), (63, False), (64, True)):
        mean = np.full(size, 0.4)
        mean[0] = 0.5
        waited = np.full(size, 1000)
        waited[0] = 1
        first = chosen(top(view_of(mean, 8, waited=waited), np.random.default_rng(0)), 8)
        assert (0 not in first) is rests


def test_a_resting_task_at_its_best_is_below_one_never_seen_and_above_a_certain_one() -> None:
    beta, now = BetaPosterior(), np.zeros(1)
    signal = np.full(200, beta.signal(np.array([[0.0, 8.0]]), now)[0])  # 0 of 8
    signal[1] = beta.signal(np.zeros((1, 2)), now)[0]
    signal[0] = beta.signal(np.full((1, 2), 4 / 0.3), now)[0]  # 4 of 8 for ever
    waited = np.full(200, 1000)
    waited[0] = 1
    view = view_of(np.full(200, 0.5), 8, signal=signal, waited=waited)
    assert chosen(top(view, np.random.default_rng(0)), 2) == [1, 0]


def test_proportional_frequencies() -> None:
    # One slot, 4,000 draws; six standard errors, a false alarm in 1e8 runs over the four tasks.
    mean = np.array([0.5, 0.1, 0.02, 1.0])
    rng, counts = np.random.default_rng(0), np.zeros(4)
    for _ in range(4_000):
        counts[int(np.argmax(proportional(view_of(mean, 1), rng)))] += 1
    expected = mean * (1 - mean) / (mean * (1 - mean)).sum()
    error = np.sqrt(expected * (1 - expected) / 4_000)
    assert (np.abs(counts / 4_000 - expected) <= 6 * error).all()


def test_band_is_uniform_inside_and_empty_outside() -> None:
    priority = band(view_of(np.array([0.0, 0.2, 1.0, 0.999]), 4), np.random.default_rng(0))
    assert np.isfinite(priority).tolist() == [False, True, False, True]


def test_thompson_scores_the_drawn_rate() -> None:
    view = view_of(np.full(3, 0.5), 1, draw=lambda rng: np.array([0.1, 0.5, 0.99]))
    assert thompson(view, np.random.default_rng(0)).tolist() == pytest.approx([0.09, 0.25, 0.0099])


def test_skip_passes_over_certain_tasks_more_and_more() -> None:
    # 4,000 draws; 2^-3 kept with a standard error of .0053, the floor .1 with .0048: six of them, 1e-8.
    view = view_of(np.full(3, 0.5), 3, num_certain=np.array([0, 3, 50]))
    rng = np.random.default_rng(0)
    kept = np.mean([np.isfinite(skip(view, rng)) for _ in range(4_000)], axis=0)
    assert kept[0] == 1.0
    assert abs(kept[1] - 0.125) < 0.032
    assert abs(kept[2] - 0.1) < 0.029


def test_pools_give_hard_and_easy_their_share() -> None:
    mean = np.repeat([0.0, 0.5, 1.0], 20)
    rng, counts = np.random.default_rng(0), np.zeros(3)
    for _ in range(500):
        for i in chosen(pools(view_of(mean, 16, revisit=0.25), rng), 16):
            counts[i // 20] += 1
    assert (counts / 500).tolist() == [2, 12, 2]  # .125 of 16 slots each


def test_pools_fill_up_from_any_pool() -> None:
    assert len(chosen(pools(view_of(np.zeros(9), 8), np.random.default_rng(0)), 8)) == 8


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_a_pure_function_of_view_and_generator(name: str) -> None:
    view = view_of(np.linspace(0, 1, 30), 8)
    before = view.mean.copy(), view.signal.copy()
    results = [RULES[name](view, np.random.default_rng(3)) for _ in range(2)]
    assert np.array_equal(*results)
    assert np.array_equal(view.mean, before[0])
    assert np.array_equal(view.signal, before[1])


@given(
    spread=st.lists(st.floats(0, 0.5), min_size=1, max_size=12),
    group_size=st.integers(2, 9),
)
@settings(max_examples=40, deadline=None)
def test_allocate_keeps_the_sum_the_bounds_and_the_order(spread: list[float], group_size: int) -> None:
    total = group_size * len(spread)
    sizes = allocate(total, np.array(spread), 2, 4 * group_size)
    assert sum(sizes) == total
    assert min(sizes) >= 2
    assert max(sizes) <= 4 * group_size
    for a, x in zip(spread, sizes, strict=True):
        assert all(x >= y - 1 for b, y in zip(spread, sizes, strict=True) if a >= b)


def test_allocate_is_proportional_and_refuses_the_impossible() -> None:
    assert allocate(40, np.array([0.4, 0.2, 0.2]), 2, 32) == [20, 10, 10]
    assert allocate(9, np.zeros(3), 2, 32) == [3, 3, 3]
    with pytest.raises(ValueError, match="cannot sum to 3"):
        allocate(3, np.ones(2), 2, 8)


def test_a_band_without_an_estimator_is_the_textbooks() -> None:
    """A posterior's mean never leaves (0, 1): every task would be inside, and the rule no rule at all."""
    sampler = TaskSampler(range(10), select="band")
    for key in range(10):
        sampler.observe(key, [1, 0] * 4 if key == 3 else [float(key % 2)] * 8, 0)
    assert sampler.metrics()["num_inside"] == 1
    assert all(3 in sampler.select(2, step) for step in range(1, 20))
    assert sampler.state_dict()["estimator"] == "LastGroup(init=0.5)"
