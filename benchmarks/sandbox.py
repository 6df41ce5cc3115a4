"""The sandbox, measured: a run of four cases, beside the bare fork that it cannot do without.

    python benchmarks/sandbox.py [--runs 400] [--steps 3]

Then how many runs the sampling of a training step asks for, and what share of its time they take.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agentrl.gym.env import BugFixEnv
from agentrl.gym.sandbox import Outcome, Sandbox
from results import commit

SOURCE = "def f(x):\n    total = 0\n    for i in range(x):\n        total += i\n    return total"
CASES = [(0,), (1,), (5,), (10,)]
GAP_SECONDS = 0.003

# Forks as the warm parent does, in an interpreter like it, with children that end at once.
BARE = """
import gc, json, os, sys, time
from agentrl.gym.server import preload
hooks = preload()
if sys.argv[2] == "hooks":
    for hook in hooks:
        os.register_at_fork(**hook)
gc.collect()
gc.freeze()
seconds = []
for _ in range(int(sys.argv[1])):
    start = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    seconds.append(time.perf_counter() - start)
print(json.dumps(seconds))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=3, help="training steps; 0 measures none")
    args = parser.parse_args()
    print(
        f"commit {commit()}, {platform.machine()}, Python {platform.python_version()}, "
        f"`python benchmarks/sandbox.py --runs {args.runs} --steps {args.steps}`\n"
    )
    print("| milliseconds | 10% | median | 90% | CPU |")
    print("| --- | --- | --- | --- | --- |")
    for name, mode in (("bare fork", "none"), ("bare fork, hooks of modules included", "hooks")):
        report(name, bare_forks(args.runs, mode))
    for name, gap in (("run of four cases, back to back", 0.0), ("with 3 ms between them", GAP_SECONDS)):
        report(name, *timed_runs(args.runs, gap))
    if args.steps:
        report_steps(args.steps)


def report(name: str, seconds: Sequence[float], cpu_seconds: float | None = None) -> None:
    """Print one row; the CPU time of all processes is the mean of a run."""
    deciles = statistics.quantiles(seconds, n=10)
    cells = [f"{1000 * deciles[i]:.2f}" for i in (0, 4, 8)]
    cpu = "" if cpu_seconds is None else f"{1000 * cpu_seconds:.2f}"
    print(f"| {name} | {' | '.join(cells)} | {cpu} |", flush=True)


def bare_forks(num_forks: int, mode: str) -> list[float]:
    """Seconds of each fork of a child that ends at once, until it was waited for."""
    root = Path(__file__).parents[1] / "src"
    command = [sys.executable, "-s", "-S", "-P", "-B", "-c", BARE, str(num_forks), mode]
    env = {"PYTHONPATH": str(root)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def timed_runs(num_runs: int, gap_seconds: float) -> tuple[list[float], float]:
    """Seconds of each run, and CPU seconds of one in all processes, with a share of their start and end."""
    before = os.times()
    with Sandbox(cache_size=0) as sandbox:
        for _ in range(10):
            sandbox.call(SOURCE, "f", CASES)
        seconds: list[float] = []
        for _ in range(num_runs):
            time.sleep(gap_seconds)
            start = time.perf_counter()
            sandbox.call(SOURCE, "f", CASES)
            seconds.append(time.perf_counter() - start)
    after = os.times()
    cpu_seconds = sum(after[:4]) - sum(before[:4])  # children's too, which have ended
    return seconds, cpu_seconds / (num_runs + 10)


def report_steps(num_steps: int) -> None:
    """Sample for a few steps; count what reaches the sandbox, and what of that its cache does not know."""
    import torch

    import agentrl as arl

    tok, cfg = arl.build_tokenizer(arl.make_tasks("all")), arl.RLConfig()
    model = arl.make_rl_base(tok)
    tasks = arl.make_tasks("train")
    generator = torch.Generator().manual_seed(0)
    print()
    with Sandbox() as sandbox:
        for step in range(1, num_steps + 1):
            seconds: list[float] = []
            num_runs = sandbox.num_runs

            def execute(
                source: str, function: str, cases: Sequence[tuple[object, ...]], taken: list[float] = seconds
            ) -> list[Outcome]:
                start = time.perf_counter()
                outcomes = sandbox.call(source, function, cases)
                taken.append(time.perf_counter() - start)
                return outcomes

            chosen = [tasks[i] for i in torch.randperm(len(tasks), generator=generator)[:8].tolist()]
            start = time.perf_counter()
            arl.sample_groups(
                model, lambda e=execute: BugFixEnv(cfg.max_turns, e), chosen, tok, cfg, generator
            )
            total = time.perf_counter() - start
            print(
                f"sampling of step {step}, 64 episodes: {len(seconds)} calls, {sandbox.num_runs - num_runs} "
                f"not in the cache; {sum(seconds):.3f} of {total:.2f} s, {sum(seconds) / total:.0%}"
            )


if __name__ == "__main__":
    main()
