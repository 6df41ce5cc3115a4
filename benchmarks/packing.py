"""What packing saves before any model runs: bins a rule needs, fill of the rows, tokens computed once.

    python benchmarks/packing.py [--trajectories FILE] [--max-tokens 256] [--num-lengths 10000 1000000]

FILE is one that `agentrl.save_trajectories` wrote; without it the fill is that of synthetic episodes.
"""

import argparse
import math
import platform
import time
from typing import get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import agentrl as arl
from agentrl.data.bins import Algorithm, min_bins
from results import commit

SEED = 0


def bins_table(num_lengths: list[int], capacity: int = 65536) -> Table:
    """Bins and seconds of every rule on lengths of median 8,192, and on triples that plain rules miss."""
    table = Table(
        "lengths", "rule", "bins", "lower bound", "fill", "seconds", title=f"Bins of {capacity:,} tokens"
    )
    inputs = {
        f"{num:,} lognormal": np.random.default_rng(SEED)
        .lognormal(math.log(8192), 0.8, num)
        .round()
        .clip(256, capacity)
        .astype(np.int64)
        for num in num_lengths
    }
    inputs["300 triples"] = np.repeat([26215, 19660, 19659], 300)
    for name, lengths in inputs.items():
        bound = min_bins(lengths, capacity)
        for algorithm in get_args(Algorithm):
            start = time.perf_counter()
            bins = arl.pack_lengths(lengths, capacity, algorithm=algorithm)
            seconds = time.perf_counter() - start
            fill = lengths.sum() / (len(bins) * capacity)
            table.add_row(name, algorithm, f"{len(bins):,}", f"{bound:,}", f"{fill:.2%}", f"{seconds:.3f}")
    return table


def budgets_table() -> Table:
    """Batches of 512 lengths under a token budget, and what a fixed count of 8 costs instead."""
    generator = torch.Generator().manual_seed(SEED)
    spread = torch.exp(0.8 * torch.randn(512, generator=generator))
    lengths = (8192 * spread).clamp(256, 65536).long()
    ways = {
        "8 a batch, random order": torch.randperm(512, generator=generator).view(64, 8).tolist(),
        "8 a batch, sorted": lengths.argsort(descending=True).view(64, 8).tolist(),
        "budget of 131,072, padded": arl.token_budget_batches(lengths, 131_072),
        "budget of 131,072, packed": arl.token_budget_batches(lengths, 131_072, packed=True),
        "budget of 65,536, packed": arl.token_budget_batches(lengths, 65_536, packed=True),
    }
    table = Table(
        "batches", "count", "padding", "largest", title=f"512 lengths, {int(lengths.sum()):,} tokens"
    )
    for name, batches in ways.items():
        packed = name.endswith("packed")
        costs = [int(lengths[b].sum()) if packed else len(b) * int(lengths[b].max()) for b in batches]
        padding = 1 - int(lengths.sum()) / sum(costs)
        table.add_row(name, f"{len(batches)}", f"{padding:.1%}", f"{max(costs):,}")
    return table


def fill_table(trajs: list[arl.Trajectory], max_tokens: int) -> Table:
    """Positions computed for the trajectories: padded to the longest, in flat rows, with shared prefixes."""
    lengths = [t.num_tokens for t in trajs]
    total = sum(lengths)
    table = Table(
        "layout",
        "rows",
        "positions",
        "fill",
        "computed tokens",
        title=f"{len(trajs)} trajectories, {total:,} tokens",
    )
    padded = len(trajs) * max(lengths)
    table.add_row(
        f"padded to {max(lengths)}", f"{len(trajs)}", f"{padded:,}", f"{total / padded:.1%}", f"{padded:,}"
    )
    for name, share in (("flat rows", False), ("prefix trees", True)):
        packed = arl.pack_sequences(trajs, max_tokens, share_prefixes=share)
        positions = packed.ids.numel()
        table.add_row(
            f"{name} of {max_tokens}",
            f"{len(packed.rows)}",
            f"{positions:,}",
            f"{packed.num_tokens / positions:.1%}",
            f"{packed.num_tokens:,}",
        )
    return table


def episodes(num: int = 64, longest: int = 256) -> list[arl.Trajectory]:
    """Synthetic episodes, 8 attempts a prompt, whose lengths spread like an agent's: most are short."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = (64 * torch.exp(0.6 * torch.randn(num, generator=generator))).clamp(24, longest).long().tolist()
    prompts = torch.randint(2, 1000, (-(-num // 8), 20), generator=generator)
    return [
        trajectory(torch.cat([prompts[i // 8], torch.randint(2, 1000, (n - 20,), generator=generator)]), 20)
        for i, n in enumerate(lengths)
    ]


def attempts(num_groups: int, group_size: int, prompt: int, response: int) -> list[arl.Trajectory]:
    """Groups of attempts at one prompt, responses of equal length."""
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(2, 1000, (num_groups, prompt), generator=generator)
    return [
        trajectory(torch.cat([prompts[g], torch.randint(2, 1000, (response,), generator=generator)]), prompt)
        for g in range(num_groups)
        for _ in range(group_size)
    ]


def trajectory(ids: torch.Tensor, prompt: int) -> arl.Trajectory:
    """A trajectory whose tokens after the prompt are all actions."""
    mask = (torch.arange(1, ids.numel()) >= prompt).float()
    return arl.Trajectory(ids, mask, -mask, reward=0.0)


def seconds_table() -> Table:
    """Seconds to lay out a million tokens."""
    trajs = attempts(20, 38, 1024, 300)
    table = Table("layout", "seconds", title=f"Laying out {sum(t.num_tokens for t in trajs):,} tokens")
    for name, share in (("flat rows", False), ("prefix trees", True)):
        start = time.perf_counter()
        arl.pack_sequences(trajs, 16384, share_prefixes=share)
        table.add_row(name, f"{time.perf_counter() - start:.3f}")
    start = time.perf_counter()
    arl.prefix_forest([t.ids for t in trajs])
    table.add_row("the forest alone", f"{time.perf_counter() - start:.3f}")
    return table


def provenance() -> str:
    """Commit, machine and seed, for the caption of a result."""
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"commit {commit()}; {machine}; seed {SEED}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", metavar="FILE")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--num-lengths", type=int, nargs="*", default=[10_000, 1_000_000])
    args = parser.parse_args()
    trajs = arl.load_trajectories(args.trajectories) if args.trajectories else episodes()
    console = Console(width=110)
    console.print(provenance())
    console.print(bins_table(args.num_lengths))
    console.print(budgets_table())
    console.print(fill_table(trajs, args.max_tokens))
    console.print(fill_table(attempts(4, 8, 1024, 512), 8192))
    console.print(seconds_table())


if __name__ == "__main__":
    main()
