"""Estimators: what the rewards of past groups say about a task's next one.

An estimator is a frozen set of constants and pure functions on arrays. It keeps no data: the sampler owns one
row of floats for each task, so a thousand tasks are updated, or read, in one call.
"""

# K tasks, N groups observed together (of N different tasks), G episodes a group, F floats of state a task

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class Estimator(Protocol):
    """What `TaskSampler` needs of an estimator; any class with these members will do.

    A state names its estimator by its repr, so that one with other constants is refused: best a dataclass.
    """

    is_pass_rate: ClassVar[bool]  # whether `mean` is a pass rate, so that a band (low, high) means something

    def initial(self) -> FloatArray:
        """State [F] of a task that has not been seen."""
        ...

    def update(self, states: FloatArray, rewards: FloatArray, elapsed: FloatArray) -> FloatArray:
        """States [N, F] after one more group each: rewards [N, G], NaN where an episode gave no evidence (at
        least one entry a row is a number), elapsed [N] steps after the task's last evidence."""
        ...

    def mean(self, states: FloatArray, elapsed: FloatArray) -> FloatArray:
        """Estimated mean reward [K] of states [K, F], elapsed [K] steps after their last evidence."""
        ...

    def signal(self, states: FloatArray, elapsed: FloatArray) -> FloatArray:
        """Expected variance [K] of the reward within the task's next group; 0: no gradient expected."""
        ...


def estimator_name(estimator: Estimator) -> str:
    """What a saved state calls its estimator: its repr, or its class where that would be an address.

    >>> estimator_name(BetaPosterior(prior=(1, 1))) == estimator_name(BetaPosterior())
    True
    """
    kind = type(estimator)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__repr__ is object.__repr__ else repr(estimator)


def mixed_probability(pass_rate: float | FloatArray, group_size: int) -> FloatArray:
    """Probability that a group neither passes nor fails as a whole: 1 - p^G - (1-p)^G.

    >>> round(float(mixed_probability(0.1, 8)), 4)
    0.5695
    """
    p = np.asarray(pass_rate, np.float64)
    return 1 - p**group_size - (1 - p) ** group_size


def group_variance(rewards: FloatArray) -> FloatArray:
    """Unbiased variance [N] of the rewards [N, G] within each group; NaN entries are left out, and a group
    with fewer than two numbers has variance 0.

    >>> variance = group_variance(np.array([[1, 1, 1, 0, 0, 0, 0, 0], [0.5] * 8]))
    >>> float(variance[0]) == 15 / 56, float(variance[1])
    (True, 0.0)
    """
    squares, degrees = _sum_of_squares(rewards)
    return squares / np.maximum(degrees, 1)


def _sum_of_squares(rewards: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Squared deviations from the group's mean, summed, and their degrees of freedom; [N] each."""
    is_number = ~np.isnan(rewards)
    mean = np.nansum(rewards, axis=1) / np.maximum(is_number.sum(1), 1)
    deviation = np.where(is_number, rewards - mean[:, None], 0.0)
    # Equal rewards must give exactly 0, also where their rounded mean differs from them.
    deviation[np.nanmax(rewards, axis=1) == np.nanmin(rewards, axis=1)] = 0.0
    return (deviation**2).sum(1), np.maximum(is_number.sum(1) - 1.0, 0.0)


def bernoulli_variance(mean: FloatArray) -> FloatArray:
    """p(1-p), and 0 where a mean reward lies outside [0, 1]."""
    return np.maximum(mean * (1 - mean), 0.0)


def _as_floats(estimator: Any, *names: str) -> None:
    """Make constants floats, so that 1 and 1.0 have one repr."""
    for name in names:
        object.__setattr__(estimator, name, float(getattr(estimator, name)))


def _check_share(name: str, value: float, *, zero: bool = False) -> None:
    if not (0 < value <= 1 or (zero and value == 0)):
        raise ValueError(f"{name} must lie in {'[0' if zero else '(0'}, 1], got {value}")


@dataclass(frozen=True, slots=True)
class LastGroup:
    """The mean reward of the task's last group: the textbook's estimate. Unseen tasks have `init`.

    With 8 episodes a task with p = .1 looks hopeless after 43% of its groups, and then stays out of the band.

    >>> estimator = LastGroup(init=0.5)
    >>> state = estimator.update(estimator.initial()[None], np.array([[1.0, 0, 0, 0]]), np.zeros(1))
    >>> float(estimator.mean(state, np.zeros(1))[0])
    0.25
    """

    init: float = 0.5
    is_pass_rate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _as_floats(self, "init")

    def initial(self) -> FloatArray:
        return np.array([self.init])

    def update(self, states: FloatArray, rewards: FloatArray, elapsed: FloatArray) -> FloatArray:
        return np.nanmean(rewards, axis=1, keepdims=True)

    def mean(self, states: FloatArray, elapsed: FloatArray) -> FloatArray:
        return states[:, 0]

    def signal(self, states: FloatArray, elapsed: FloatArray) -> FloatArray:
        return bernoulli_variance(states[:, 0])


@dataclass(frozen=True, slots=True)
class WindowMean:
    """The mean over the task's last `num_groups` groups, each counted alike. Unseen tasks have `init`."""

    num_groups: int = 3
    init: float = 0.5
    is_pass_rate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise ValueError(f"num_groups must be at least 1, got {self.num_groups}")
        _as_floats(self, "init")

    def initial(self) -> FloatArray:
        return np.full(self.num_groups, np.nan)

    def update(self, states: FloatArray, rewards: FloatArray, elapsed: FloatArray) -> FloatArray:
        return np.concatenate([states[:, 1:], np.nanmean(rewards, axis=1, keepdims=True)], axis=1)

    def mean(self, states: FloatArray, elapsed: FloatArray) -> FloatArray:
        count = (~np.isnan(states)).sum(1)
        return np.where(count > 0, np.nansum(states, axis=1) / np.maximum(count, 1), self.init)

    def signal(self, states: FloatArray, elapsed: FloatArray) -> FloatArray:
        return bernoulli_variance(self.mean(states, elapsed))


@dataclass(frozen=True, slots=True)
class EMA:
    """Exponential moving average: mean += rate * (group's mean - mean). The first group sets it."""

    rate: float = 0.3
    init: float = 0.5
    is_pass_rate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_share("rate", self.rate)
        _as_floats(self, "rate", "init")

    def initial(self) -> FloatArray:
        return np.array([np.nan])

    def update(self, states: FloatArray, rewards: FloatArray, elapsed: FloatArray) -> FloatArray:
        group: FloatArray = np.nanmean(rewards, axis=1, keepdims=True)
        averaged: FloatArray = states + self.rate * (group - states)
        return np.where(np.isnan(states), group, averaged)

    def mean(self, states: FloatArray, elapsed: FloatArray) -> FloatArray:
        return np.where(np.isnan(states[:, 0]), self.init, states[:, 0])

    def signal(self, states: FloatArray, elapsed: FloatArray) -> FloatArray:
        return bernoulli_variance(self.mean(states, elapsed))


@dataclass(frozen=True, slots=True)
class BetaPosterior:
    """A Beta posterior of the pass rate that forgets towards its prior; for rewards of 0 and 1.

    The state is what lies above the prior: passes and failures. Each new group first scales them by
    `discount` (the policy has moved), each step without evidence by `time_discount`, so an old verdict fades
    and the task becomes worth a look again. With a = prior + passes and b = prior + failures the mean is
    a/(a+b) and

        E[p(1-p)] = a b / ((a+b) (a+b+1)),

    the signal. It is never 0: eight failures of eight leave .0818, where a point estimate says "certain".

    >>> beta, now = BetaPosterior(time_discount=1.0), np.zeros(1)
    >>> state = beta.update(beta.initial()[None], np.ones((1, 8)), now)
    >>> state = beta.update(state, np.zeros((1, 8)), now)
    >>> a, b = beta.parameters(state, now)
    >>> [round(float(x[0]), 4) for x in (a, b, beta.mean(state, now), beta.signal(state, now))]
    [6.6, 9.0, 0.4231, 0.2294]
    """

    prior: tuple[float, float] = (1.0, 1.0)
    discount: float = 0.7
    time_discount: float = 0.999
    is_pass_rate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if len(self.prior) != 2 or min(self.prior) <= 0:
            raise ValueError(f"prior must be two positive pseudo-counts (passes, failures), got {self.prior}")
        _check_share("discount", self.discount, zero=True)
        _check_share("time_discount", self.time_discount)
        _as_floats(self, "discount", "time_discount")
        object.__setattr__(self, "prior", (float(self.prior[0]), float(self.prior[1])))

    def initial(self) -> FloatArray:
        return np.zeros(2)

    def update(self, states: FloatArray, rewards: FloatArray, elapsed: FloatArray) -> FloatArray:
        other = rewards[~np.isnan(rewards) & (rewards != 0) & (rewards != 1)]
        if other.size:
            raise ValueError(
                f"BetaPosterior counts passes (1) and failures (0), got a reward of {other[0]:g}; let a "
                "pass/fail metric decide (TaskSampler(metric=...)), or use DiscountedVariance() for others"
            )
        kept = states * (self.discount * self.time_discount**elapsed)[:, None]
        passes = np.nansum(rewards, axis=1)
        return kept + np.stack([passes, (~np.isnan(rewards)).sum(1) - passes], axis=1)

    def parameters(self, states: FloatArray, elapsed: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Alpha and beta, [K] each."""
        above = states * (self.time_discount**elapsed)[:, None]
        return self.prior[0] + above[:, 0], self.prior[1] + above[:, 1]

    def mean(self, states: FloatArray, elapsed: FloatArray) -> FloatArray:
        a, b = self.parameters(states, elapsed)
        return a / (a + b)

    def signal(self, states: FloatArray, elapsed: FloatArray) -> FloatArray:
        a, b = self.parameters(states, elapsed)
        return a * b / ((a + b) * (a + b + 1))

    def draw(self, states: FloatArray, elapsed: FloatArray, rng: np.random.Generator) -> FloatArray:
        """One pass rate [K] from each posterior (Thompson sampling)."""
        return rng.beta(*self.parameters(states, elapsed))


@dataclass(frozen=True, slots=True)
class DiscountedVariance:
    """The reward's variance within groups, pooled over a task's groups; for real-valued rewards.

    A mean says nothing about them: eight rewards of .5 have no signal. The state is the discounted sum of
    squares S about each group's own mean, its degrees of freedom D, and the discounted mean. A task's
    variance is shrunk, with the weight of `prior_degrees` degrees of freedom, towards the variance pooled
    over all tasks:

        (prior_degrees * pooled + S) / (prior_degrees + D),    pooled = sum(S) / sum(D),

    so the rewards may have any scale, and unseen tasks have the pooled variance (1 where nothing is seen).

    >>> estimator, now = DiscountedVariance(), np.zeros(1)
    >>> state = estimator.update(estimator.initial()[None], np.array([[1.0, 1, 1, 0, 0, 0, 0, 0]]), now)
    >>> float(estimator.signal(state, now)[0]) == 15 / 56
    True
    """

    discount: float = 0.7
    time_discount: float = 0.999
    prior_degrees: float = 1.0
    is_pass_rate: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_share("discount", self.discount, zero=True)
        _check_share("time_discount", self.time_discount)
        if not self.prior_degrees > 0:
            raise ValueError(f"prior_degrees must be positive, got {self.prior_degrees}")
        _as_floats(self, "discount", "time_discount", "prior_degrees")

    def initial(self) -> FloatArray:
        return np.zeros(4)  # S, D, discounted sum of rewards, discounted number of rewards

    def update(self, states: FloatArray, rewards: FloatArray, elapsed: FloatArray) -> FloatArray:
        kept = states * (self.discount * self.time_discount**elapsed)[:, None]
        count = (~np.isnan(rewards)).sum(1)
        return kept + np.stack([*_sum_of_squares(rewards), np.nansum(rewards, axis=1), count], axis=1)

    def mean(self, states: FloatArray, elapsed: FloatArray) -> FloatArray:
        """Discounted mean reward; 0 for unseen tasks."""
        return states[:, 2] / np.where(states[:, 3] > 0, states[:, 3], 1.0)

    def signal(self, states: FloatArray, elapsed: FloatArray) -> FloatArray:
        faded = self.time_discount**elapsed
        squares, degrees = states[:, 0] * faded, states[:, 1] * faded
        total = degrees.sum()
        pooled = squares.sum() / total if total > 0 else 1.0
        return (self.prior_degrees * pooled + squares) / (self.prior_degrees + degrees)
