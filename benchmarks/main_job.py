"""The main job, measured: the supervised base, then RL over several seeds.

    python benchmarks/main_job.py [--seeds 0 1 2 3] [--steps 60]

Prints the tables of docs/benchmarks.md.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import agentrl as arl
from agentrl.gym.tasks import Task
from agentrl.gym.tokenizer import Tokenizer
from agentrl.rollout.episode import play
from results import commit

EVAL_SAMPLES = 16  # episodes a task, as the target says
BASE_SAMPLES = 64


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    print(
        f"commit {commit()}, {platform.machine()}, torch {torch.__version__}, "
        f"`python benchmarks/main_job.py --seeds {' '.join(map(str, args.seeds))} --steps {args.steps}`\n"
    )
    tok = arl.build_tokenizer(arl.make_tasks("all"))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        base = arl.make_rl_base(tok, cache_dir=Path(folder))
        trained = time.perf_counter() - start
        start = time.perf_counter()
        arl.make_rl_base(tok, cache_dir=Path(folder))
        cached = time.perf_counter() - start
    size = sum(p.numel() for p in base.parameters())
    print(
        f"base: {size:,} parameters, vocabulary {len(tok)}, {trained:.0f} s to train, {cached:.2f} s cached\n"
    )
    report_base(base, tok)
    report_runs(base, tok, args.seeds, args.steps)


def row(*cells: object) -> None:
    """Print one row of a Markdown table."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def header(*cells: str) -> None:
    """Print the head of a Markdown table."""
    row(*cells)
    row(*("---" for _ in cells))


def report_base(base: arl.TinyAgent, tok: Tokenizer) -> None:
    """Pass rates, lengths and decoding cost of the base."""
    cfg = arl.RLConfig()
    header("base", "pass rate", "mixed groups of 8", "shortest", "median", "p90", "longest", "padding of 64")
    decoding: list[str] = []
    for split in ("train", "heldout", "all"):
        trajs, stats = play(
            base,
            lambda: arl.make_env(cfg),
            [task for task in arl.make_tasks(split) for _ in range(BASE_SAMPLES)],
            tok,
            max_tokens=cfg.max_tokens,
            temperature=cfg.temperature,
            generator=torch.Generator().manual_seed(0),
        )
        groups = [trajs[i : i + 8] for i in range(0, len(trajs), 8)]
        mixed = statistics.mean(len({t.reward for t in group}) > 1 for group in groups)
        lengths = sorted(t.num_tokens for t in trajs)
        stride = len(trajs) // 64
        batches = [[t.num_tokens for t in trajs[i::stride]] for i in range(stride)]
        padding = statistics.mean(1 - sum(batch) / (len(batch) * max(batch)) for batch in batches)
        row(
            split,
            f"{statistics.mean(t.reward for t in trajs):.3f}",
            f"{mixed:.0%}",
            lengths[0],
            f"{statistics.median(lengths):.0f}",
            lengths[int(0.9 * len(lengths))],
            lengths[-1],
            f"{padding:.0%}",
        )
        ratio = stats.num_without_cache / stats.num_positions
        decoding.append(
            f"decoding {split}: {stats.num_positions:,} positions with the cache, "
            f"{stats.num_without_cache:,} without: {ratio:.1f} times as many"
        )
    print("\n" + "\n".join(decoding))


def report_runs(base: arl.TinyAgent, tok: Tokenizer, seeds: Sequence[int], steps: int) -> None:
    """One RL run a seed."""
    heldout, train = arl.make_tasks("heldout"), arl.make_tasks("train")
    print()
    header(
        "seed", "held-out before", "after", "train after", "seconds", "sampling", "training", "mixed at first"
    )
    rates: list[tuple[float, float]] = []
    for seed in seeds:
        cfg = arl.RLConfig(seed=seed)
        model = arl.TinyAgent(base.config)
        model.load_state_dict(base.state_dict())
        before = pass_rate(model, heldout, tok, cfg)
        start = time.perf_counter()
        history = arl.train_rl(model, train, tok, cfg, steps)
        seconds = time.perf_counter() - start
        rates.append((before, pass_rate(model, heldout, tok, cfg)))
        row(
            seed,
            *(f"{rate:.3f}" for rate in (*rates[-1], pass_rate(model, train, tok, cfg))),
            f"{seconds:.0f}",
            *(f"{sum(h[f'seconds_{phase}'] for h in history):.0f}" for phase in ("sampling", "training")),
            f"{statistics.mean(1 - h['zero_adv_frac'] for h in history[:10]):.0%}",
        )
    row("mean", *(f"{statistics.mean(column):.3f}" for column in zip(*rates, strict=True)), *[""] * 5)


def pass_rate(model: arl.TinyAgent, tasks: Sequence[Task], tok: Tokenizer, cfg: arl.RLConfig) -> float:
    """Share of EVAL_SAMPLES episodes a task that pass, at temperature 1."""
    generator = torch.Generator().manual_seed(1000)
    return arl.evaluate(model, tasks, tok, EVAL_SAMPLES, generator=generator, cfg=cfg)["pass_rate"]


if __name__ == "__main__":
    main()
