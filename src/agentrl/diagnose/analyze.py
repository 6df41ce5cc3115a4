"""What a file of trajectories would waste in training: every figure with what to do about it."""

# B trajectories, V vocabulary

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.data.bins import min_bins, pack_lengths
from agentrl.data.microbatch import token_budget_batches
from agentrl.data.trajectory import Trajectory
from agentrl.diagnose.census import NUM_QUARTERS, Census
from agentrl.plan.hours import Plan, calibrated
from agentrl.plan.memory import peak_logits_bytes
from agentrl.plan.workload import Workload, measured_lengths

_BARS = "▁▂▃▄▅▆▇█"
_NUM_BINS = 12
_WEIGHT_OFF = 0.2  # a token's weight counts as distorted where it is further than this from what it should be


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure: its name, its value for programs and for people, and what to do about it."""

    name: str
    value: Any  # a number, or a list or dict of numbers
    text: str
    advice: str


@dataclass(frozen=True, slots=True)
class Analysis:
    """Everything that was found, by section, and how many trajectories it rests on."""

    num_trajectories: int
    sections: dict[str, list[Finding]]

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
        "Trajectories": _trajectories(census),
        "Positions": _positions(census, max_tokens),
        "Microbatches": _microbatches(census, max_tokens, options.microbatch),
        "Rows": _rows(census, max_tokens),
        "Groups": _groups(census),
        "Logits": _logits(census, max_tokens, vocab_size),
        "Sampler against trainer": _mismatch(census),
    }
    if options.plan is not None:
        sections["Cost"] = _cost(census, options.plan)
    return Analysis(len(census), sections)


def _trajectories(census: Census) -> list[Finding]:
    lengths, actions = census.lengths, census.actions
    total = int(lengths.sum())
    share = float(actions.sum() / total)
    p50, p90, p99 = (int(np.quantile(lengths, q, method="inverted_cdf")) for q in (0.5, 0.9, 0.99))
    median = float(np.median(lengths))
    counts, edges = np.histogram(lengths, bins=_NUM_BINS, range=(0, lengths.max()))
    kinds = ", ".join(f"{count:,} {source}" for source, count in census.sources.items())
    marked = census.num_retokenized
    return [
        Finding(
            "trajectories",
            len(census),
            f"{len(census):,} ({kinds})",
            f"{marked:,} are retokenized: not the sampler's tokens; record ids to train on them."
            if marked
            else "All hold recorded token ids: they can be trained on as they are.",
        ),
        Finding(
            "tokens",
            total,
            f"{total:,}",
            "The shares below are of these; another tokenizer moves them.",
        ),
        Finding(
            "lengths",
            {
                "median": median,
                "p90": p90,
                "p99": p99,
                "longest": int(lengths.max()),
                "mean": total / len(census),
            },
            f"median {median:,.0f}, p90 {p90:,}, p99 {p99:,}, longest {int(lengths.max()):,}",
            f"The longest, {lengths.max() / max(1, p50):.1f} times the median, must not shape the batch.",
        ),
        Finding(
            "length histogram",
            {"counts": counts.tolist(), "edges": edges.tolist()},
            f"0 {_sparkline(counts)} {int(lengths.max()):,}",
            "A long tail is what padding, lack of memory and idle ranks come from: pack.",
        ),
        Finding(
            "action share",
            share,
            f"{share:.1%} of tokens",
            f"Only these carry a gradient: compute no logits for the other {1 - share:.0%}.",
        ),
    ]


def _sparkline(counts: NDArray[np.int64]) -> str:
    top = max(1, int(counts.max()))
    return "".join(
        " " if n == 0 else _BARS[min(len(_BARS) - 1, n * len(_BARS) // (top + 1))] for n in counts.tolist()
    )


def _positions(census: Census, max_tokens: int) -> list[Finding]:
    lengths = census.lengths
    total, padded = int(lengths.sum()), int(lengths.max()) * len(census)
    in_groups, whole = census.distinct_in_groups, census.distinct
    group_share, file_share = in_groups.count() / total, whole.count() / total
    about = "" if in_groups.is_exact else "about "
    about_file = "" if whole.is_exact else "about "
    bins = pack_lengths(lengths, max_tokens, overflow="solo")
    # a trajectory longer than a row makes a longer row
    rows = sum(max(max_tokens, int(lengths[members].sum())) for members in bins)
    return [
        Finding(
            "padding to the longest",
            1 - total / padded,
            f"{padded:,} positions, {1 - total / padded:.1%} padding",
            "Do not pad to the longest: this share of the compute is waste.",
        ),
        Finding(
            "packed positions",
            rows,
            f"{rows:,} in rows of {max_tokens:,}, {max(0.0, 1 - total / rows):.1%} padding",
            f"pack_sequences(trajs, {max_tokens}): {padded / rows:.1f} times fewer, the same gradient.",
        ),
        Finding(
            "shared within groups",
            group_share,
            f"{about}{group_share:.1%} of tokens are distinct",
            f"share_prefixes=True: {1 - group_share:.0%} fewer than packed, each group's prompt once.",
        ),
        Finding(
            "shared over the file",
            file_share,
            f"{about_file}{file_share:.1%} of tokens are distinct",
            "The gap to the line above is what groups share: put several in one row.",
        ),
    ]


def _padded(lengths: NDArray[np.int64], batches: Iterable[list[int]]) -> NDArray[np.int64]:
    """Positions of each padded batch: its count times its longest."""
    return np.array([len(batch) * int(lengths[batch].max()) for batch in batches], dtype=np.int64)


def _microbatches(census: Census, max_tokens: int, count: int) -> list[Finding]:
    lengths, actions = census.lengths, census.actions
    fixed = [list(range(i, min(i + count, len(census)))) for i in range(0, len(census), count)]
    positions = _padded(lengths, fixed)
    total = int(lengths.sum())
    budget = _padded(lengths, token_budget_batches(lengths, max_tokens, overflow="solo"))
    packed = token_budget_batches(lengths, max_tokens, packed=True, overflow="solo")
    largest_packed = max(int(lengths[batch].sum()) for batch in packed)
    share = actions / max(1, int(actions.sum()))
    # a mean over each microbatch, averaged: a token weighs 1 / (M * its microbatch's actions), not 1 / all
    inside = np.array([share[batch].sum() for batch in fixed])
    used = inside[inside > 0]
    ratio = 1 / (used.size * used)
    off = float(used[np.abs(ratio - 1) > _WEIGHT_OFF].sum())
    return [
        Finding(
            f"{count} sequences each, in file order",
            {
                "microbatches": len(fixed),
                "largest": int(positions.max()),
                "padding": 1 - total / int(positions.sum()),
            },
            f"{len(fixed):,} microbatches, largest {int(positions.max()):,} positions, "
            f"{1 - total / int(positions.sum()):.1%} padding",
            f"Memory must hold the largest, {positions.max() / np.median(positions):.1f} times the median: "
            "batch by tokens instead.",
        ),
        Finding(
            "token budget, padded",
            {
                "microbatches": budget.size,
                "largest": int(budget.max()),
                "padding": 1 - total / int(budget.sum()),
            },
            f"{budget.size:,} microbatches, largest {int(budget.max()):,} positions, "
            f"{1 - total / int(budget.sum()):.1%} padding",
            f"token_budget_batches(lengths, {max_tokens}): neighbours in length, a hard limit.",
        ),
        Finding(
            "token budget, packed",
            {"microbatches": len(packed), "largest": largest_packed},
            f"{len(packed):,} microbatches, largest {largest_packed:,} positions, no padding",
            "The same with packed=True: the budget holds tokens only.",
        ),
        Finding(
            "weight distortion of a per-microbatch mean",
            {"lowest": float(ratio.min()), "highest": float(ratio.max()), "share off by 20%": off}
            if used.size
            else None,
            f"tokens weigh {ratio.min():.2f} to {ratio.max():.2f} times what they should; "
            f"{off:.0%} are off by more than {_WEIGHT_OFF:.0%}"
            if used.size
            else "no action token",
            "The split changes the gradient: fix weights over the step (token_weights), then sum.",
        ),
    ]


def _rows(census: Census, max_tokens: int) -> list[Finding]:
    lengths = census.lengths
    total = int(lengths.sum())
    findings: list[Finding] = []
    for capacity in (max_tokens, 2 * max_tokens, 4 * max_tokens):
        num_rows = len(pack_lengths(lengths, capacity, overflow="solo"))
        fitting = lengths[lengths <= capacity]
        bound = min_bins(fitting, capacity) + int((lengths > capacity).sum())
        beyond = num_rows - bound
        fill = min(1.0, total / (num_rows * capacity))
        findings.append(
            Finding(
                f"rows of {capacity:,}",
                {"rows": num_rows, "lower bound": bound, "fill": fill},
                f"{num_rows:,}, at least {bound:,}; {fill:.1%} full",
                "No packing into rows of this length needs fewer."
                if beyond == 0
                else f'At most {beyond:,} rows to gain: try algorithm="portfolio".',
            )
        )
    return findings


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
    middle = (rewards.min() + rewards.max()) / 2 if rewards.max() > rewards.min() else 0.0
    flat = [group for group in groups if group.min() == group.max()]
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
            float(rewards.mean()),
            f"{rewards.mean():.2f} over {rewards.size:,} episodes",
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


def _logits(census: Census, max_tokens: int, vocab_size: int) -> list[Finding]:
    share = float(census.actions.sum() / census.lengths.sum())
    where = f"of a microbatch of {max_tokens:,} tokens, V = {vocab_size:,}, float32 with gradient"
    chunk = min(1024, max_tokens)
    gigabytes = {
        how: peak_logits_bytes(how, vocab_size, max_tokens, chunk, share) / 1e9
        for how in ("full", "chunked", "recomputed", "actions")
    }
    together = (
        peak_logits_bytes("recomputed", vocab_size, max(1, round(share * max_tokens)), chunk, share) / 1e9
    )
    return [
        Finding(
            "logits in full",
            gigabytes["full"],
            f"{gigabytes['full']:.2f} GB",
            f"The logits {where}: do not hold them.",
        ),
        Finding(
            "logits in chunks",
            gigabytes["chunked"],
            f"{gigabytes['chunked']:.2f} GB",
            f"Chunks of {chunk:,} do not help alone: a plain backward keeps them all.",
        ),
        Finding(
            "logits of action tokens only",
            gigabytes["actions"],
            f"{gigabytes['actions']:.2f} GB",
            f"Compute them at the {share:.0%} of positions that need them; the arithmetic falls too.",
        ),
        Finding(
            "logits of action tokens, recomputed in chunks",
            together,
            f"{together:.2f} GB",
            "action_log_probs holds no more than this, whatever the microbatch.",
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
    flat = sum(group.size for group in groups if group.min() == group.max())
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
