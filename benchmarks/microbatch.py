"""What waiting for the slowest rank costs: our plan beside three simple ways to split a step.

    python benchmarks/microbatch.py [--num-lengths 1024] [--num-ranks 8] [--max-tokens 65536] [--seeds 5]

Lengths are lognormal (median 8,192, clipped to 256..65,536); costs are FLOPs of the model. `lockstep` is the
sum over microbatches of the slowest rank over the mean, `rank sum` the slowest rank's sum over the mean, both
as mean / worst over the seeds; `slots` are the microbatches of each rank, and `over the cap` counts those of
all ranks above --max-tokens, both as means.
"""

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table

import agentrl as arl
from agentrl.plan.configs import find_model
from results import commit

Ranks = list[list[list[int]]]  # [rank][slot] -> indices


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step to be split."""

    lengths: list[int]
    costs: list[float]
    num_ranks: int
    max_tokens: int


def draw_lengths(seed: int, num: int) -> torch.Tensor:
    """Lengths of `num` sequences."""
    generator = torch.Generator().manual_seed(seed)
    return (8192 * torch.exp(0.8 * torch.randn(num, generator=generator))).clamp(256, 65536).long()


def round_robin(step: Step) -> Ranks:
    """Longest first, dealt to the ranks in turn; each rank then fills its microbatches first fit."""
    order = sorted(range(len(step.lengths)), key=lambda i: -step.lengths[i])
    ranks: Ranks = []
    for rank in range(step.num_ranks):
        mine = order[rank :: step.num_ranks]
        bins = arl.pack_lengths(
            [step.lengths[i] for i in mine], step.max_tokens, algorithm="first_fit_decreasing"
        )
        ranks.append([[mine[i] for i in members] for members in bins])
    num_slots = max(map(len, ranks))
    return [rank + [[] for _ in range(num_slots - len(rank))] for rank in ranks]


def karmarkar_karp(values: list[float], num_parts: int) -> list[list[int]]:
    """Parts with sums that are nearly equal: the largest differencing method (Karmarkar and Karp 1982).

    Of partial solutions, the two whose largest and smallest sums differ most are joined, the largest part of
    one with the smallest of the other, until one is left.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, value in enumerate(values):
        heap.append((-value, i, [(value, [i])] + [(0.0, []) for _ in range(num_parts - 1)]))
    heapify(heap)
    while len(heap) > 1:
        _, tie, first = heappop(heap)
        second = heap[0][2]
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapreplace(heap, (joined[-1][0] - joined[0][0], tie, joined))
    return [part for _, part in heap[0][2]]


def without_cap(step: Step) -> Ranks:
    """Karmarkar and Karp over ranks, then over the microbatches of each rank, as many as the tokens need."""
    num_slots = math.ceil(sum(step.lengths) / (step.num_ranks * step.max_tokens))
    ranks: Ranks = []
    for mine in karmarkar_karp(step.costs, step.num_ranks):
        parts = karmarkar_karp([step.costs[i] for i in mine], num_slots)
        ranks.append([[mine[i] for i in part] for part in parts])
    return ranks


def fixed_count(step: Step, count: int = 8) -> Ranks:
    """`count` sequences a microbatch, in the order in which they came."""
    batches = [list(range(i, i + count)) for i in range(0, len(step.lengths), count)]
    batches = [[i for i in batch if i < len(step.lengths)] for batch in batches]
    batches += [[] for _ in range(-len(batches) % step.num_ranks)]
    return [batches[rank :: step.num_ranks] for rank in range(step.num_ranks)]


def imbalances(step: Step, ranks: Ranks) -> tuple[float, float]:
    """The lockstep and the rank-sum imbalance."""
    costs = np.array([[math.fsum(step.costs[i] for i in slot) for slot in rank] for rank in ranks])
    mean = costs.sum() / step.num_ranks
    return float(costs.max(0).sum() / mean), float(costs.sum(1).max() / mean)


def timed(way: Callable[[Step], Ranks], step: Step) -> tuple[Ranks, float]:
    """The split and the median of three runs, in seconds of CPU."""
    seconds: list[float] = []
    for _ in range(3):
        start = time.process_time()
        way(step)
        seconds.append(time.process_time() - start)
    return way(step), statistics.median(seconds)


def spread(values: list[float], digits: int = 3) -> str:
    """Mean and worst."""
    return f"{statistics.mean(values):.{digits}f} / {max(values):.{digits}f}"


def comparison(args: argparse.Namespace) -> Table:
    """Every way on the same lengths."""
    cost = arl.attention_cost(find_model(args.model))

    def ours(step: Step, objective: str, cost: Callable[[int], float] | None = cost) -> Ranks:
        return arl.plan_microbatches(
            step.lengths,
            max_tokens=step.max_tokens,
            num_ranks=step.num_ranks,
            cost=cost,
            objective=objective,  # type: ignore[arg-type]
        ).ranks

    ways: dict[str, Callable[[Step], Ranks]] = {
        "plan_microbatches, lockstep": lambda step: ours(step, "lockstep"),
        "plan_microbatches, rank_sum": lambda step: ours(step, "rank_sum"),
        "plan_microbatches, by tokens": lambda step: ours(step, "lockstep", None),
        "longest first, round robin": round_robin,
        "Karmarkar-Karp, no cap": without_cap,
        "8 a microbatch": fixed_count,
    }
    table = Table(
        Column("way", no_wrap=True),
        "slots",
        "over the cap",
        "largest",
        "lockstep",
        "rank sum",
        "CPU ms",
        title=f"{args.num_lengths} lengths, {args.num_ranks} ranks, {args.max_tokens:,} tokens, {args.model}",
    )
    drawn = [draw_lengths(seed, args.num_lengths).tolist() for seed in range(args.seeds)]
    steps = [Step(n, [cost(x) for x in n], args.num_ranks, args.max_tokens) for n in drawn]
    for name, way in ways.items():
        lockstep: list[float] = []
        rank_sum: list[float] = []
        seconds: list[float] = []
        tokens: list[int] = []
        slots: list[int] = []
        for step in steps:
            ranks, taken = timed(way, step)
            seconds.append(taken)
            slots.append(len(ranks[0]))
            tokens += [sum(step.lengths[i] for i in slot) for rank in ranks for slot in rank]
            found = imbalances(step, ranks)
            lockstep.append(found[0])
            rank_sum.append(found[1])
        table.add_row(
            name,
            f"{statistics.mean(slots):.1f}",
            f"{sum(t > args.max_tokens for t in tokens) / len(steps):.0f}",
            f"{max(tokens):,}",
            spread(lockstep),
            spread(rank_sum),
            f"{1e3 * statistics.median(seconds):.0f}",
        )
    return table


def provenance(num_seeds: int) -> str:
    """Commit, machine and seeds, for the caption of a result."""
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"commit {commit()}; {machine}; seeds 0 to {num_seeds - 1}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-lengths", type=int, default=1024)
    parser.add_argument("--num-ranks", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=65536)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--model", default="Qwen3-8B")
    args = parser.parse_args()
    console = Console(width=110)
    console.print(provenance(args.seeds))
    console.print(comparison(args))


if __name__ == "__main__":
    main()
