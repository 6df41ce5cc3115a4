"""The estimators' pinned numbers, and the properties that selection relies on."""

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.curriculum.pass_rate import (
    EMA,
    BetaPosterior,
    DiscountedVariance,
    Estimator,
    FloatArray,
    LastGroup,
    WindowMean,
    group_variance,
    mixed_probability,
)
from agentrl.curriculum.sampler import TaskSampler

NOW = np.zeros(1)
ALL: list[Any] = [LastGroup(), WindowMean(3), EMA(0.3), BetaPosterior(), DiscountedVariance()]


def group(num_passed: int, size: int = 8) -> FloatArray:
    return np.array([[1.0] * num_passed + [0.0] * (size - num_passed)])


def after(estimator: Estimator, *groups: FloatArray) -> FloatArray:
    state = estimator.initial()[None]
    for rewards in groups:
        state = estimator.update(state, rewards, NOW)
    return state


def test_pinned_beta_numbers() -> None:
    beta = BetaPosterior(discount=0.7)
    state = after(beta, group(8), group(0))
    alpha, bet = beta.parameters(state, NOW)
    assert alpha[0] == pytest.approx(6.6, rel=1e-14)
    assert bet[0] == pytest.approx(9.0, rel=1e-14)
    assert beta.mean(state, NOW)[0] == pytest.approx(6.6 / 15.6, rel=1e-14)
    assert round(float(beta.mean(state, NOW)[0]), 3) == 0.423
    assert round(float(beta.signal(state, NOW)[0]), 4) == 0.2294


@pytest.mark.parametrize(("groups", "signal"), [((), 0.1667), ((0,), 0.0818), ((1,), 0.1455), ((4,), 0.2273)])
def test_pinned_expected_signal(groups: tuple[int, ...], signal: float) -> None:
    beta = BetaPosterior()
    assert round(float(beta.signal(after(beta, *map(group, groups)), NOW)[0]), 4) == signal


def test_pinned_variance_and_mixed_probability() -> None:
    assert group_variance(group(3))[0] == 15 / 56
    estimator = DiscountedVariance()
    assert estimator.signal(after(estimator, group(3)), NOW)[0] == 15 / 56
    assert round(float(mixed_probability(0.1, 8)), 4) == 0.5695
    assert mixed_probability(np.array([0.0, 1.0]), 8).tolist() == [0.0, 0.0]


def test_expected_signal_is_the_posterior_mean_of_p_times_one_minus_p() -> None:
    # 200,000 draws: the threshold is six standard errors, a false alarm in 5e8 runs.
    beta = BetaPosterior()
    state = after(beta, group(8), group(3), group(2))
    p = beta.draw(np.repeat(state, 200_000, axis=0), np.zeros(200_000), np.random.default_rng(0))
    values = p * (1 - p)
    assert abs(values.mean() - beta.signal(state, NOW)[0]) < 6 * values.std() / values.size**0.5


def test_beta_forgets_towards_its_prior() -> None:
    beta = BetaPosterior(prior=(2.0, 3.0))
    state = after(beta, group(8), group(8), group(8))
    steps = np.array([0.0, 100.0, 1000.0, 1e5])
    means = beta.mean(np.repeat(state, 4, axis=0), steps)
    assert (np.diff(means) < 0).all()
    assert means[-1] == pytest.approx(0.4, abs=1e-9)


def test_time_passed_before_an_update_counts() -> None:
    beta = BetaPosterior(discount=0.5, time_discount=0.9)
    state = beta.update(after(beta, group(8)), group(0), np.array([3.0]))
    np.testing.assert_allclose(state, [[8 * 0.5 * 0.9**3, 8.0]], rtol=1e-14)


def test_last_group_window_and_ema() -> None:
    last, window, ema = LastGroup(), WindowMean(3), EMA(0.3)
    groups = [group(k) for k in (8, 0, 4, 2)]
    assert last.mean(after(last, *groups), NOW)[0] == 0.25
    assert window.mean(after(window, *groups[:1]), NOW)[0] == 1.0
    assert window.mean(after(window, *groups), NOW)[0] == pytest.approx((0 + 0.5 + 0.25) / 3)
    assert ema.mean(after(ema, *groups[:2]), NOW)[0] == pytest.approx(0.7)
    for estimator in (LastGroup(0.4), WindowMean(3, init=0.4), EMA(init=0.4)):
        assert estimator.mean(estimator.initial()[None], NOW)[0] == 0.4


def test_equal_real_valued_rewards_have_no_signal() -> None:
    # A band on the mean would keep this task forever.
    estimator = DiscountedVariance()
    assert estimator.signal(after(estimator, np.full((1, 8), 0.5)), NOW)[0] == 0.0
    assert estimator.signal(after(estimator, np.full((1, 7), 0.1)), NOW)[0] == 0.0  # .1 * 7 / 7 != .1
    assert LastGroup().signal(after(LastGroup(), np.full((1, 8), 0.5)), NOW)[0] == 0.25


@given(scale=st.floats(1e-3, 1e3), shift=st.floats(-100, 100))
@settings(max_examples=25, deadline=None)
def test_variance_ranks_tasks_alike_on_any_scale(scale: float, shift: float) -> None:
    estimator, zeros = DiscountedVariance(), np.zeros(4)
    rewards = np.random.default_rng(0).normal(size=(4, 8)) * np.array([[0.1], [1.0], [3.0], [0.5]])
    start = np.tile(estimator.initial(), (4, 1))
    plain = estimator.signal(estimator.update(start, rewards, zeros), zeros)
    moved = estimator.signal(estimator.update(start, scale * rewards + shift, zeros), zeros)
    np.testing.assert_allclose(moved, scale**2 * plain, rtol=1e-6)


def test_unseen_tasks_have_the_pooled_variance() -> None:
    estimator = DiscountedVariance()
    states = np.concatenate([after(estimator, 100 * group(4)), estimator.initial()[None]])
    assert estimator.signal(states, np.zeros(2))[1] == pytest.approx(100**2 * 2 / 7)
    assert estimator.signal(estimator.initial()[None], NOW)[0] == 1.0


@pytest.mark.parametrize("estimator", ALL, ids=lambda e: type(e).__name__)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_missing_episodes_are_no_evidence_and_rows_are_independent(
    estimator: Any, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    padded = np.full((len(sizes), 8), np.nan)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for row, size in zip(padded, sizes, strict=True):
        row[rng.permutation(8)[:size]] = rng.integers(0, 2, size)
    n = len(sizes)
    together = np.tile(estimator.initial(), (n, 1))
    alone = [estimator.initial()[None] for _ in range(n)]
    for _ in range(2):
        together = estimator.update(together, padded, np.full(n, 2.0))
        alone = [
            estimator.update(state, row[~np.isnan(row)][None], np.full(1, 2.0))
            for state, row in zip(alone, padded, strict=True)
        ]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-12)
    elapsed = np.arange(n, dtype=np.float64)
    assert ((estimator.mean(together, elapsed) >= 0) & (estimator.mean(together, elapsed) <= 1)).all()
    assert (estimator.signal(together, elapsed) >= 0).all()


def test_beta_refuses_rewards_that_are_neither_pass_nor_failure() -> None:
    with pytest.raises(ValueError, match=r"got a reward of 0\.5.*DiscountedVariance"):
        after(BetaPosterior(), np.array([[1.0, 0.5]]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: BetaPosterior(prior=(0.0, 1.0)),
        lambda: BetaPosterior(discount=1.5),
        lambda: BetaPosterior(time_discount=0.0),
        lambda: EMA(0.0),
        lambda: EMA(float("nan")),
        lambda: WindowMean(0),
        lambda: DiscountedVariance(prior_degrees=0),
        lambda: DiscountedVariance(discount=-0.1),
    ],
)
def test_constants_out_of_range(make: Any) -> None:
    with pytest.raises(ValueError, match=r"must be|must lie"):
        make()


class Plain:
    """An estimator of a user's own, no dataclass: the last group's mean."""

    is_pass_rate: ClassVar[bool] = True

    def initial(self) -> Any:
        return np.zeros(1)

    def update(self, states: Any, rewards: Any, elapsed: Any) -> Any:
        return np.nanmean(rewards, axis=1, keepdims=True)

    def mean(self, states: Any, elapsed: Any) -> Any:
        return states[:, 0]

    def signal(self, states: Any, elapsed: Any) -> Any:
        return states[:, 0] * (1 - states[:, 0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BetaPosterior(prior=(1, 1), discount=0), BetaPosterior(discount=0.0)),
        (BetaPosterior(prior=[1, 1], time_discount=1), BetaPosterior(time_discount=1.0)),  # type: ignore
        (LastGroup(init=0), LastGroup(init=0.0)),
        (WindowMean(3, init=1), WindowMean(3, init=1.0)),
        (EMA(rate=1, init=1), EMA(rate=1.0, init=1.0)),
        (DiscountedVariance(1, 1, 2), DiscountedVariance(1.0, 1.0, 2.0)),
        (Plain(), Plain()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_state_knows_its_estimator_however_its_constants_are_written(one: Any, other: Any) -> None:
    first, second = TaskSampler(["a", "b"], one), TaskSampler(["a", "b"], other)
    first.observe("a", [1, 0, 0], 0)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    with pytest.raises(ValueError, match="make it with the same estimator"):
        TaskSampler(["a", "b"], BetaPosterior(discount=0.123)).load_state_dict(first.state_dict())
