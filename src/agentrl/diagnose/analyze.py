"""What a file of trajectories would waste in training: every figure with what to do about it."""

# B trajectories, V vocabulary

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentrl.data.advantages import rewards_differ
from agentrl.data.trajectory import Trajectory
from agentrl.diagnose.census import NUM_QUARTERS, Census
from agentrl.diagnose.waste import Finding, logits, microbatches, positions, rows, trajectories
from agentrl.plan.hours import Plan, calibrated
from agentrl.plan.workload import Workload, measured_lengths


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything that was found, by section, and how many trajectories it rests on."""

    num_trajectories: int
    sections: dict[str, list[Finding]]

    def __contains__(self, name: str) -> bool:
        """Whether there is a figure of that name."""
        return any(f.name == name for findings in self.sections.values() for f in findings)

    def __getitem__(self, name: str) -> Any:
        """The value of the figure of that name.

        Raises KeyError, listing the names, for a figure that is not there.
        """
        found = {f.name: f.value for findings in self.sections.values() for f in findings}
        if name not in found:
            raise KeyError(f"no figure {name!r}; figures are {', '.join(found)}")
        return found[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeOptions:
    """What the trajectories are measured against."""

    max_tokens: int | None = (
        None  # tokens of a row and of a microbatch; None: the power of 2 that holds the longest
    )
    microbatch: int = 8  # sequences of a microbatch of fixed count
    vocab_size: int | None = None  # of the logits; None: the largest id + 1
    plan: Plan | None = None  # the run whose cost is projected, with the file's own workload


def analyze(trajs: Iterable[Trajectory], options: AnalyzeOptions | None = None) -> Analysis:
    """What training on these trajectories would waste; `trajs` is read once and not held.

    Raises ValueError where there is no trajectory.

    >>> import torch
    >>> def trajectory(n, reward):
    ...     return Trajectory(torch.arange(n), torch.ones(n - 1), torch.zeros(n - 1), reward, {"task": "t"})
    >>> found = analyze([trajectory(10, 0.0), trajectory(20, 1.0)])
    >>> found["tokens"], found["padding to the longest"], found["groups without signal"]
    (30, 0.25, 0)
    """
    census = Census()
    for traj in trajs:
        census.add(traj)
    return conclude(census, options or AnalyzeOptions())


def conclude(census: Census, options: AnalyzeOptions) -> Analysis:
    """The analysis of what a census counted."""
    if len(census) == 0:
        raise ValueError("no trajectory to analyze; every record was skipped, or the files hold none")
    longest = int(census.lengths.max())
    max_tokens = options.max_tokens or 1 << max(0, longest - 1).bit_length()
    vocab_size = options.vocab_size or census.max_id + 1
    sections = {
        "Trajectories": trajectories(census),
        "Positions": positions(census, max_tokens),
        "Microbatches": microbatches(census, max_tokens, options.microbatch),
        "Rows": rows(census, max_tokens),
        "Groups": _groups(census),
        "Logits": logits(census, max_tokens, vocab_size),
        "Sampler against trainer": _mismatch(census),
    }
    if options.plan is not None:
        sections["Cost"] = _cost(census, options.plan)
    return Analysis(len(census), sections)


def _groups(census: Census) -> list[Finding]:
    if census.num_without_reward == len(census):
        return [
            Finding(
                "rewards",
                None,
                "not recorded",
                "Nothing can be said about signal: these formats keep the reward in another file.",
            )
        ]
    groups = list(census.group_rewards())
    rewards = np.concatenate(groups)
    size = max(1.0, float(np.abs(rewards).max()))  # the sum of large rewards would overflow
    mean = float((rewards / size).mean()) * size
    middle = rewards.min() / 2 + rewards.max() / 2 if rewards.max() > rewards.min() else 0.0
    flat = [group for group in groups if not rewards_differ(group)]
    passed = sum(group[0] > middle for group in flat)
    alone = sum(group.size == 1 for group in groups)
    wasted = sum(group.size for group in flat)
    rates = np.array([(group > middle).mean() for group in groups])
    bins = [
        int((rates == 0).sum()),
        *(int(((rates > low) & (rates <= low + 0.25) & (rates < 1)).sum()) for low in (0.0, 0.25, 0.5, 0.75)),
        int((rates == 1).sum()),
    ]
    names = ("0%", "to 25%", "to 50%", "to 75%", "below 100%", "100%")
    missing = census.num_without_reward
    return [
        Finding(
            "mean reward",
            mean,
            f"{mean:.2f} over {rewards.size:,} episodes",
            f"{missing:,} trajectories have no recorded reward and count as 0."
            if missing
            else "Signal is largest in the middle of the range; far from it, change the tasks.",
        ),
        Finding(
            "groups",
            len(groups),
            f"{len(groups):,}, {rewards.size / len(groups):.1f} episodes each",
            f"{alone:,} have one episode, nothing to compare it with: sample more a task."
            if alone
            else "Episodes of a group are compared with each other.",
        ),
        Finding(
            "groups without signal",
            len(flat),
            f"{len(flat):,} of {len(groups):,} ({passed:,} all passed, {len(flat) - passed:,} all failed)",
            "Equal rewards are zero advantages: choose tasks by pass rate (TaskSampler).",
        ),
        Finding(
            "pass rates",
            dict(zip(names, bins, strict=True)),
            ", ".join(f"{name}: {count:,}" for name, count in zip(names, bins, strict=True) if count),
            f"Passed: reward above {middle:g}. Retire tasks at 100%; try those at 0% again later.",
        ),
        Finding(
            "rollouts wasted",
            wasted,
            f"{wasted:,} of {rewards.size:,} episodes ({wasted / rewards.size:.0%})",
            f"They bought no gradient: a batch full of signal costs "
            f"{rewards.size / max(1, rewards.size - wasted):.1f} times its rollouts.",
        ),
    ]


def _mismatch(census: Census) -> list[Finding]:
    found = census.mismatch
    num = int(found.num_tokens.sum())
    if num == 0:
        have = census.num_with_sampler
        return [
            Finding(
                "mismatch",
                None,
                f"{have:,} trajectories have the sampler's log-probs, none the trainer's"
                if have
                else "no log-probs recorded",
                "agentrl verify --model M --trajectories FILE compares them with the model."
                if have
                else "Record them where you sample: without them off-policy error is invisible.",
            )
        ]
    with np.errstate(invalid="ignore"):
        by_quarter = found.num_off / found.num_tokens
    off, gap = found.num_off.sum() / num, found.gap_sum.sum() / num
    quarters = [None if np.isnan(x) else float(x) for x in by_quarter]
    first, last = (quarters[0] or 0.0), (quarters[NUM_QUARTERS - 1] or 0.0)
    return [
        Finding(
            "tokens off by more than 20%",
            float(off),
            f"{off:.2%} of {num:,} action tokens",
            "At step 0 this should be near 0: look for a leaky mask, other positions or another precision; "
            "agentrl verify tells them apart.",
        ),
        Finding(
            "gap",
            {"mean": float(gap), "max": found.max_gap},
            f"mean {gap:.4f} nats, max {found.max_gap:.2f} nats",
            "A mean above about 0.01 is more than rounding; importance weights then clip real learning.",
        ),
        Finding(
            "off, by quarter of the trajectory",
            quarters,
            ", ".join("-" if x is None else f"{x:.2%}" for x in quarters),
            "It grows along the row, as a leak does: check packing and positions."
            if last > 2 * first and last > 0.01
            else "Flat along the row, as a precision gap is, not a leak.",
        ),
    ]


def _cost(census: Census, plan: Plan) -> list[Finding]:
    workload = workload_of(census, plan.workload)
    spread = measured_lengths(census.lengths.astype(float).tolist(), min(64, len(census)))
    run = replace(plan, workload=workload, lengths=spread)
    estimate = calibrated(run)
    idle = estimate.step_hours.waiting / estimate.step_hours.total
    signal = replace(run, workload=replace(workload, zero_advantage=0.0))
    saved = estimate.run_gpu_hours - calibrated(signal).run_gpu_hours
    return [
        Finding(
            "projected cost",
            estimate.run_gpu_hours,
            f"{estimate.run_gpu_hours:,.0f} GPU-hours: {workload.steps:,} steps of "
            f"{workload.episodes:,} episodes",
            f"{plan.shape.name}, {plan.gpus} {plan.gpu.name}: {idle:.0%} is waiting; "
            "agentrl plan says what would help.",
        ),
        Finding(
            "cost of groups without signal",
            saved,
            f"{saved:,.0f} GPU-hours of it",
            "What sampling only tasks with signal would save.",
        ),
    ]


def workload_of(census: Census, base: Workload) -> Workload:
    """The workload `base` with the shape of the counted episodes: tokens, actions, prompt, turns, signal."""
    groups = list(census.group_rewards())
    flat = sum(group.size for group in groups if not rewards_differ(group))
    episodes = sum(group.size for group in groups)
    recorded = census.num_without_reward == 0
    return replace(
        base,
        tokens=float(census.lengths.mean()),
        sampled=max(1.0, float(census.actions.mean())),
        prompt=float(min(census.prompts.mean(), census.lengths.mean() - census.actions.mean())),
        turns=max(1, round(float(census.turns.mean()))),
        zero_advantage=min(0.99, flat / episodes) if recorded else 0.0,
    )
