"""Selection rules: from what is known about every task to the priority of a slot in the next step.

A rule gives each task a number; the sampler fills its slots from the largest down and never takes a task at
-inf. Rules are pure functions of a `View` and a random generator, so each can be read and tested alone.
"""

# K tasks

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.curriculum.pass_rate import FloatArray, bernoulli_variance

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class View:
    """What a rule may know when `num_slots` tasks are wanted; vectors are [K], in the order of the tasks."""

    num_slots: int
    mean: FloatArray  # estimated mean reward
    signal: FloatArray  # expected variance of the reward within the next group
    inside: BoolArray  # low < mean < high
    below: BoolArray  # mean <= low: too hard
    visited: BoolArray  # handed out or observed at least once
    waited: IntArray  # steps since the last visit, or since the task was added
    num_certain: IntArray  # groups in a row without signal, up to the last one
    revisit: float  # share of slots that the caller reserves for tasks the rule would leave alone
    headroom: float  # how much more an unsolved task counts than a solved one of equal signal; `top` only
    rested: float  # factor on the signal of a task that rests after a visit; `top` only
    draw: Callable[[np.random.Generator], FloatArray]  # one pass rate [K] from each posterior


Rule = Callable[[View, np.random.Generator], FloatArray]


def uniform(view: View, rng: np.random.Generator) -> FloatArray:
    """Any task, with equal probability."""
    return rng.random(view.mean.size)


def band(view: View, rng: np.random.Generator) -> FloatArray:
    """Any task inside the band, with equal probability: the textbook's rule."""
    return np.where(view.inside, rng.random(view.mean.size), -np.inf)


def top(view: View, rng: np.random.Generator) -> FloatArray:
    """The tasks with the largest expected signal, after two corrections (measured in docs/curriculum.md).

    Headroom: p(1-p) cannot tell a solved task from a failed one, but only the failed one has anything left
    to gain. The signal is scaled by 1 + headroom * (1 - mean), which decides between tasks nearly alike.

    Diversity: with K tasks and n slots, a task rests for min(4, K // (8 n)) steps after a visit: not at all
    in a small set, 4 steps where there are 32 tasks and more to a slot. Resting scales its signal by
    `rested`, .65 by default: a task at its best then has .16, below the .1667 of one never seen and above
    every task known to be nearly certain. So while there are unseen tasks, none gets more than every fifth
    step.
    """
    rest = min(4, view.mean.size // (8 * view.num_slots))
    resting = view.visited & (view.waited <= rest)
    score = np.where(resting, view.rested, 1.0) * view.signal
    if view.headroom:
        score = score * (1 + view.headroom * (1 - np.clip(view.mean, 0, 1)))
    # Ties, such as the tasks never seen, fall to chance.
    return np.where(view.inside, score * (1 + 1e-9 * rng.random(score.size)), -np.inf)


def proportional(view: View, rng: np.random.Generator) -> FloatArray:
    """Without replacement, each draw with probability proportional to the expected signal.

    The largest log(u)/w are such a sample (Efraimidis and Spirakis 2006).
    """
    possible = view.inside & (view.signal > 0)
    weight = np.where(possible, view.signal, 1.0)
    return np.where(possible, np.log1p(-rng.random(weight.size)) / weight, -np.inf)


def thompson(view: View, rng: np.random.Generator) -> FloatArray:
    """The largest p(1-p) where p is one draw from each task's posterior."""
    return np.where(view.inside, bernoulli_variance(view.draw(rng)), -np.inf)


def keep_probability(num_certain: IntArray, floor: float) -> FloatArray:
    """Probability [K] of rolling a task out after `num_certain` groups in a row without signal: halved by
    each, never under `floor`. The rule of GRESO (arXiv 2506.02177) with a fixed exploration probability.

    >>> keep_probability(np.array([0, 1, 9]), 0.1).tolist()
    [1.0, 0.5, 0.1]
    """
    return np.maximum(floor, 0.5**num_certain)


def skip(view: View, rng: np.random.Generator) -> FloatArray:
    """Tasks in random order, each passed over with a probability that grows with its certain groups."""
    kept = rng.random(view.mean.size) < keep_probability(view.num_certain, view.revisit)
    return np.where(kept & view.inside, rng.random(view.mean.size), -np.inf)


def pools(view: View, rng: np.random.Generator) -> FloatArray:
    """Three pools: hard (mean <= low), normal, easy (mean >= high). Hard and easy have a fixed share of the
    slots each, half of `revisit`; a pool that is too small leaves its slots to the normal one, or to any.
    Tasks of any pool that are due come besides."""
    order = rng.random(view.mean.size)
    priority = np.where(view.inside, 1 + order, order)
    for pool in (view.below, ~view.inside & ~view.below):
        # Rounded at random, so that a share of .4 slots a step is .4 on average.
        quota = int(view.revisit / 2 * view.num_slots + rng.random())
        members = np.flatnonzero(pool)
        first = members[np.argsort(-order[members])[:quota]]
        priority[first] = 2 + order[first]
    return priority


RULES: dict[str, Rule] = {
    "uniform": uniform,
    "band": band,
    "top": top,
    "proportional": proportional,
    "thompson": thompson,
    "skip": skip,
    "pools": pools,
}


def allocate(total: int, spread: FloatArray, low: int, high: int) -> list[int]:
    """Integers in [low, high] that sum to `total`, as proportional to `spread` [N] as the bounds allow.

    >>> allocate(24, np.array([0.5, 0.5, 0.1]), 2, 32)
    [11, 11, 2]
    """
    if not low * spread.size <= total <= high * spread.size:
        raise ValueError(f"{spread.size} groups of {low} to {high} episodes cannot sum to {total}")
    largest = spread.max(initial=0.0)
    spread = np.maximum(spread / largest, 1e-6) if largest > 0 else np.ones(spread.size)
    scale = [0.0, high / float(spread.min())]
    for _ in range(100):  # the sum grows with the scale: bisect
        middle = (scale[0] + scale[1]) / 2
        scale[int(np.clip(middle * spread, low, high).sum() >= total)] = middle
    exact = np.clip(scale[1] * spread, low, high)
    sizes = np.floor(exact + 1e-9).astype(np.int64)
    while sizes.sum() < total:  # the largest remainders, one each
        short = np.flatnonzero(sizes < high)
        short = short[np.argsort(sizes[short] - exact[short], kind="stable")]
        sizes[short[: total - int(sizes.sum())]] += 1
    return sizes.tolist()
