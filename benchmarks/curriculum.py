"""Simulate selection rules on tasks whose pass rates move, and print what each rule wastes.

Two worlds. In the first, every task's logit drifts by +.007 a step with noise of sd .05, whatever is
selected: it measures how well a rule finds the tasks that carry a gradient. In the second there is the noise,
but only a selected task improves, by gain * 4 q(1-q) for an observed pass rate q: it measures what the choice
is worth, and decides between rules that are close in the first. Tasks start with 35% near 0 (logit -4.75,
sd .75), 25% near 1 (+4.75, sd .75), the rest between (0, sd 1.75). Every rule meets the same drift and luck.

    python benchmarks/curriculum.py                          # both worlds, 12 seeds, 300 steps
    python benchmarks/curriculum.py --seeds 2 --steps 50     # a quick look
"""

# K tasks, n groups a step, G episodes a group

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tyro

import agentrl as arl
from agentrl.curriculum.pass_rate import DiscountedVariance, LastGroup, WindowMean, mixed_probability

GROUP_SIZE = 8
MAX_GROUP_SIZE = 32
MIDDLE_SD = 1.75  # of the 40% of logits that start around 0
Make = Callable[[int, int], arl.TaskSampler]  # (K, seed) -> sampler


@dataclass(frozen=True, kw_only=True)
class Config:
    """Seeds and steps of a simulation."""

    seeds: int = 12
    steps: int = 300
    gains: tuple[float, ...] = (0.2,)  # of the second world, one table each
    sizes: tuple[str, ...] = ("20x8", "200x8", "200x64", "2000x8", "2000x64")  # tasks x groups a step
    middle_sd: float = MIDDLE_SD
    json: Path | None = None  # also write every number here


@dataclass(frozen=True)
class Outcome:
    """One run of one rule."""

    zero_advantage: float  # expected share of rollouts in groups that pass or fail as a whole
    signal: float  # mean p(1-p) a rollout, of the true pass rates
    final: float  # mean true pass rate of all tasks at the end
    distinct: int  # tasks visited in the last 50 steps
    rollouts: float  # share of the n * G * steps rollouts that were used


def textbook(num_tasks: int, seed: int, *, fill: bool = True) -> arl.TaskSampler:
    return arl.TaskSampler(range(num_tasks), LastGroup(), "band", revisit=1, seed=seed, fill=fill)


RULES: dict[str, Make] = {
    "uniform": lambda k, s: arl.TaskSampler(range(k), select="uniform", seed=s),
    "band, last group (textbook)": textbook,
    "  the same, not filled up": lambda k, s: textbook(k, s, fill=False),
    "band, mean of 3 groups": lambda k, s: arl.TaskSampler(
        range(k), WindowMean(3), "band", revisit=1, seed=s
    ),
    "proportional": lambda k, s: arl.TaskSampler(range(k), select="proportional", seed=s),
    "thompson": lambda k, s: arl.TaskSampler(range(k), select="thompson", seed=s),
    "skip": lambda k, s: arl.TaskSampler(range(k), select="skip", seed=s),
    "pools (.2, .8)": lambda k, s: arl.TaskSampler(range(k), select="pools", low=0.2, high=0.8, seed=s),
    "top, last group": lambda k, s: arl.TaskSampler(range(k), LastGroup(), seed=s),
    "top, variance": lambda k, s: arl.TaskSampler(range(k), DiscountedVariance(), seed=s),
    "top, p(1-p) alone": lambda k, s: arl.TaskSampler(range(k), seed=s, headroom=0, rested=1),
    "top, no headroom": lambda k, s: arl.TaskSampler(range(k), seed=s, headroom=0),
    "top (default)": lambda k, s: arl.TaskSampler(range(k), seed=s),
    "  with group sizes": lambda k, s: arl.TaskSampler(range(k), seed=s),
    "  inside (.11, .89), not filled": lambda k, s: arl.TaskSampler(
        range(k), low=0.11, high=0.89, seed=s, fill=False
    ),
    "oracle": lambda k, s: arl.TaskSampler(range(k), select="uniform", seed=s),
}
# The second world runs these.
CLOSE = (
    "uniform",
    "band, last group (textbook)",
    "  the same, not filled up",
    "band, mean of 3 groups",
    "proportional",
    "top, last group",
    "top, p(1-p) alone",
    "top, no headroom",
    "top (default)",
    "  inside (.11, .89), not filled",
    "oracle",
)


def simulate(
    name: str,
    num_tasks: int,
    n: int,
    seed: int,
    steps: int,
    gain: float | None,
    middle_sd: float = MIDDLE_SD,
) -> Outcome:
    start, drift, luck, more_luck = (np.random.default_rng((seed, stream)) for stream in range(4))
    near_zero, near_one = round(0.35 * num_tasks), round(0.25 * num_tasks)
    center = np.repeat([-4.75, 4.75, 0.0], [near_zero, near_one, num_tasks - near_zero - near_one])
    spread = np.where(center == 0, middle_sd, 0.75)
    logit = start.permutation(center + spread * start.standard_normal(num_tasks))
    sampler = RULES[name](num_tasks, seed)
    wasted = signal = rollouts = 0.0
    recent: set[int] = set()
    for step in range(steps):
        p = 1 / (1 + np.exp(-logit))
        if name == "oracle":
            chosen = np.argsort(p * (p - 1))[:n]
        else:
            chosen = np.array(sampler.select(n, step), np.int64)
        size = np.full(chosen.size, GROUP_SIZE)
        if name == "  with group sizes":
            size = np.array(sampler.group_sizes(chosen.tolist(), GROUP_SIZE, step, high=MAX_GROUP_SIZE))
        uniforms = luck.random((num_tasks, GROUP_SIZE))[chosen]
        if size.max() > GROUP_SIZE:
            uniforms = np.hstack([uniforms, more_luck.random((chosen.size, MAX_GROUP_SIZE - GROUP_SIZE))])
        passed = (uniforms < p[chosen, None]).astype(np.float64)
        passed[np.arange(passed.shape[1]) >= size[:, None]] = np.nan
        sampler.observe_groups(chosen.tolist(), [row[:g] for row, g in zip(passed, size, strict=True)], step)
        q = p[chosen]
        wasted += float((size * (1 - mixed_probability(q, size))).sum())
        signal += float((size * q * (1 - q)).sum())
        rollouts += float(size.sum())
        if step >= steps - 50:
            recent.update(chosen.tolist())
        noise = 0.05 * drift.standard_normal(num_tasks)
        if gain is None:
            logit += 0.007 + noise
        else:
            logit += noise
            rate = np.nanmean(passed, axis=1)
            logit[chosen] += gain * 4 * rate * (1 - rate)
    return Outcome(
        zero_advantage=wasted / rollouts,
        signal=signal / rollouts,
        final=float((1 / (1 + np.exp(-logit))).mean()),
        distinct=len(recent),
        rollouts=rollouts / (n * GROUP_SIZE * steps),
    )


Results = dict[tuple[str, int, int], list[Outcome]]  # (rule, K, n) -> one outcome a seed


def table(title: str, results: Results, show: Callable[[list[Outcome]], str]) -> None:
    sizes = list(dict.fromkeys((k, n) for _, k, n in results))
    print(f"\n{title}\n\n| rule | {' | '.join(f'{k}x{n}' for k, n in sizes)} |\n|---{'|---' * len(sizes)}|")
    for name in dict.fromkeys(name for name, _, _ in results):
        shown = name.strip() if name[0] != " " else f"- {name.strip()}"
        print(f"| {shown} | {' | '.join(show(results[name, k, n]) for k, n in sizes)} |")


def mean(outcomes: list[Outcome], field: str) -> float:
    return float(np.mean([getattr(outcome, field) for outcome in outcomes]))


def compare(results: Results, field: str) -> None:
    """The default minus the textbook's rule, seed by seed: mean and standard error, in points."""
    cells: list[str] = []
    for k, n in dict.fromkeys((k, n) for _, k, n in results):
        pair = (results["top (default)", k, n], results["band, last group (textbook)", k, n])
        ours, theirs = (np.array([getattr(outcome, field) for outcome in outcomes]) for outcomes in pair)
        difference = 100 * (ours - theirs)
        error = difference.std(ddof=1) / len(difference) ** 0.5 if len(difference) > 1 else float("nan")
        cells.append(f"{difference.mean():+.1f} ± {error:.1f}")
    print(f"| default minus textbook, points | {' | '.join(cells)} |")


def main(config: Config) -> None:
    begin = time.perf_counter()
    sizes = [(int(k), int(n)) for k, n in (size.split("x") for size in config.sizes)]
    worlds: dict[str, Results] = {}
    for gain in (None, *config.gains):
        results: Results = {
            (name, k, n): [
                simulate(name, k, n, seed, config.steps, gain, config.middle_sd)
                for seed in range(config.seeds)
            ]
            for name in (RULES if gain is None else CLOSE)
            for k, n in sizes
        }
        worlds["drift" if gain is None else f"gain {gain}"] = results
        if gain is None:
            table(
                "Every task drifts: zero-advantage share, % (mean p(1-p) a rollout)",
                results,
                lambda o: f"{100 * mean(o, 'zero_advantage'):.1f} ({mean(o, 'signal'):.3f})",
            )
            compare(results, "zero_advantage")
            table(
                "Different tasks visited in the last 50 steps (rollouts used, % of n * G a step)",
                results,
                lambda o: f"{mean(o, 'distinct'):.0f} ({100 * mean(o, 'rollouts'):.0f})",
            )
        else:
            table(
                f"Only selected tasks improve (gain {gain}): final mean pass rate, % (zero-advantage, %)",
                results,
                lambda o: f"{100 * mean(o, 'final'):.1f} ({100 * mean(o, 'zero_advantage'):.0f})",
            )
            compare(results, "final")
    print(f"\n{config.seeds} seeds, {config.steps} steps, {time.perf_counter() - begin:.0f} s")
    if config.json is not None:
        flat = {
            world: {f"{name} {k}x{n}": [asdict(o) for o in v] for (name, k, n), v in results.items()}
            for world, results in worlds.items()
        }
        config.json.write_text(json.dumps(flat))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
