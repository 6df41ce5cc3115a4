"""Figures about tokens: lengths, padding, packing, sharing, microbatches, logits, each with what to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.data.bins import min_bins, pack_lengths
from agentrl.data.microbatch import token_budget_batches
from agentrl.diagnose.census import Census
from agentrl.plan.memory import peak_logits_bytes

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


def trajectories(census: Census) -> list[Finding]:
    """How many, how long, and how much of it the policy sampled."""
    lengths, actions = census.lengths, census.actions
    total = int(lengths.sum())
    share = float(actions.sum() / total)
    p50, p90, p99 = (int(np.quantile(lengths, q, method="inverted_cdf")) for q in (0.5, 0.9, 0.99))
    median = float(np.median(lengths))
    counts, edges = np.histogram(lengths, bins=_NUM_BINS, range=(0, lengths.max()))
    made_by = f"; text tokenized by {', '.join(sorted(census.tokenizers))}" if census.tokenizers else ""
    kinds = ", ".join(f"{count:,} {source}" for source, count in census.sources.items())
    marked = census.num_retokenized
    return [
        Finding(
            "trajectories",
            len(census),
            f"{len(census):,} ({kinds}){made_by}",
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


def positions(census: Census, max_tokens: int) -> list[Finding]:
    """Positions that a model computes: padded, packed, and with shared prefixes."""
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
            f"pack_sequences(trajs, {max_tokens}): {padded / rows:.1f} times fewer, the same gradient."
            if padded > rows
            else "Too few trajectories fill a row of this length: try another --max-tokens.",
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


def microbatches(census: Census, max_tokens: int, count: int) -> list[Finding]:
    """A fixed count against a token budget, and what a mean over each microbatch does to the weights."""
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


def rows(census: Census, max_tokens: int) -> list[Finding]:
    """Rows at three capacities against the fewest that any packing needs."""
    lengths = census.lengths
    total = int(lengths.sum())
    findings: list[Finding] = []
    for capacity in (max_tokens, 2 * max_tokens, 4 * max_tokens):
        num_rows = len(pack_lengths(lengths, capacity, overflow="solo"))
        fitting = lengths[lengths <= capacity]
        bound = min_bins(fitting, capacity) + int((lengths > capacity).sum())
        beyond = num_rows - bound
        rows_text = f"{beyond:,} row" + "s" * (beyond > 1)
        fill = min(1.0, total / (num_rows * capacity))
        findings.append(
            Finding(
                f"rows of {capacity:,}",
                {"rows": num_rows, "lower bound": bound, "fill": fill},
                f"{num_rows:,}, at least {bound:,}; {fill:.1%} full",
                "No packing into rows of this length needs fewer."
                if beyond == 0
                else f'At most {rows_text} to gain: try algorithm="portfolio".',
            )
        )
    return findings


def logits(census: Census, max_tokens: int, vocab_size: int) -> list[Finding]:
    """Bytes of the logits of one microbatch, four ways."""
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
