"""The main job, measured: supervised base, RL over several seeds, held-out pass rate, lengths, cache and seconds.

    python benchmarks/main_job.py [--seeds 0 1 2 3] [--steps 60]

Prints the tables of docs/benchmarks.md.
"""

import argparse
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import agentrl as arl
from agentrl.rollout.episode import play

EVAL_SAMPLES = 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        f"commit {commit.stdout.strip()}, {platform.machine()}, torch {torch.__version__}, "
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
    print(f"base: {size:,} parameters, vocabulary {len(tok)}, {trained:.0f} s to train, {cached:.2f} s from the cache\n")
    report_base(base, tok)
    report_runs(base, tok, args.seeds, args.steps)


def report_base(base: arl.TinyAgent, tok: object) -> None:
    """Pass rates, lengths and decoding cost of the base."""
    cfg = arl.RLConfig()
    print("| base | pass rate | mixed groups of 8 | shortest | median | 90th percentile | longest | padding of 64 |")
    print("|---|---|---|---|---|---|---|---|")
    for split in ("train", "heldout"):
        tasks = arl.make_tasks(split)
        repeated = [task for task in tasks for _ in range(64)]
        trajs, stats = play(
            base,
            lambda: arl.make_env(cfg),
            repeated,
            tok,
            max_tokens=cfg.max_tokens,
            temperature=cfg.temperature,
            generator=torch.Generator().manual_seed(0),
        )
        groups = [trajs[i : i + 8] for i in range(0, len(trajs), 8)]
        mixed = statistics.mean(len({t.reward for t in group}) > 1 for group in groups)
        lengths = sorted(t.num_tokens for t in trajs)
        batches = [[t.num_tokens for t in trajs[i::len(trajs) // 64]] for i in range(len(trajs) // 64)]
        padding = statistics.mean(1 - sum(b) / (len(b) * max(b)) for b in batches)
        print(
            f"| {split} | {statistics.mean(t.reward for t in trajs):.3f} | {mixed:.0%} | {lengths[0]} | "
            f"{statistics.median(lengths):.0f} | {lengths[int(0.9 * len(lengths))]} | {lengths[-1]} | {padding:.0%} |"
        )
    print(
        f"\ndecoding the held-out episodes: {stats.num_positions:,} positions with the cache, "
        f"{stats.num_without_cache:,} without: {stats.num_without_cache / stats.num_positions:.1f} times fewer "
        "(the chapter's gym: 22,661 against 2,472, 9.2 times)\n"
    )


def report_runs(base: arl.TinyAgent, tok: object, seeds: Sequence[int], steps: int) -> None:
    """One RL run a seed."""
    heldout, train = arl.make_tasks("heldout"), arl.make_tasks("train")
    print("| seed | held-out before | after | train after | seconds | sampling | training | mixed, first 10 steps |")
    print("|---|---|---|---|---|---|---|---|")
    rows: list[tuple[float, float]] = []
    for seed in seeds:
        cfg = arl.RLConfig(seed=seed)
        model = arl.TinyAgent(base.config)
        model.load_state_dict(base.state_dict())
        before = pass_rate(model, heldout, tok, cfg)
        start = time.perf_counter()
        history = arl.train_rl(model, train, tok, cfg, steps)
        seconds = time.perf_counter() - start
        after = pass_rate(model, heldout, tok, cfg)
        rows.append((before, after))
        sampling, training = (sum(h[f"seconds_{phase}"] for h in history) for phase in ("sampling", "training"))
        mixed = statistics.mean(1 - h["zero_adv_frac"] for h in history[:10])
        print(
            f"| {seed} | {before:.3f} | {after:.3f} | {pass_rate(model, train, tok, cfg):.3f} | {seconds:.0f} | "
            f"{sampling:.0f} | {training:.0f} | {mixed:.0%} |",
            flush=True,
        )
    mean_before, mean_after = (statistics.mean(column) for column in zip(*rows, strict=True))
    print(f"| mean | {mean_before:.3f} | {mean_after:.3f} | | | | | |")


def pass_rate(model: arl.TinyAgent, tasks: Sequence[object], tok: object, cfg: arl.RLConfig) -> float:
    """Share of EVAL_SAMPLES episodes a task that pass."""
    generator = torch.Generator().manual_seed(1000)
    return arl.evaluate(model, tasks, tok, EVAL_SAMPLES, generator=generator, cfg=cfg)["pass_rate"]


if __name__ == "__main__":
    main()
