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
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.gym.env import BugFixEnv
from agentrl.gym.sandbox import Outcome, Sandbox
from results import commit

SOURCE = "def f(x):\n    total = 0\n    for i in range(x):\n        total += i\n    return total"
CASES = [(0,), (1,), (5,), (10,)]
GAP_SECONDS = 0.003

BLOCK = 20  # what is compared takes turns, so that other load on the machine meets all alike

# Forks as the warm parent does, in an interpreter like it, children that end at once.
BARE = """
import gc, json, os, sys, time
from agentrl.gym.server import preload
hooks = preload()
for hook in hooks if sys.argv[1] == "hooks" else ():
    os.register_at_fork(**hook)
gc.collect()
gc.freeze()
for line in sys.stdin:
    seconds = []
    for _ in range(int(line)):
        start = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds), flush=True)
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
    report_runs(args.runs)
    if args.steps:
        report_steps(args.steps)


def report_runs(num_runs: int) -> None:
    """Print how long a bare fork and a run take, and the CPU time of a run in all processes."""
    with bare_forks("none") as bare, bare_forks("hooks") as hooked, Sandbox(cache_size=0) as sandbox:
        ways: dict[str, Callable[[int], list[float]]] = {
            "bare fork": lambda n: forks_of(bare, n),
            "bare fork, hooks of modules included": lambda n: forks_of(hooked, n),
            "run of four cases, back to back": lambda n: runs_of(sandbox, n, 0.0),
            "with 3 ms between them": lambda n: runs_of(sandbox, n, GAP_SECONDS),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(0, num_runs, BLOCK):
            for name, measure in ways.items():
                seconds[name] += measure(BLOCK + 1)[1:]  # the first finds cold caches
    print("| milliseconds | 10% | median | 90% |")
    print("| --- | --- | --- | --- |")
    for name, found in seconds.items():
        deciles = statistics.quantiles(found, n=10)
        print(f"| {name} | {' | '.join(f'{1000 * deciles[i]:.2f}' for i in (0, 4, 8))} |")
    before = os.times()
    with Sandbox(cache_size=0) as sandbox:
        wall_seconds = sum(runs_of(sandbox, num_runs, 0.0))
    after = os.times()
    cpu_seconds = sum(after[:4]) - sum(before[:4])  # children's too, which have ended; and their start
    print(
        f"\nback to back: {num_runs / wall_seconds:.0f} runs a second, "
        f"{1000 * cpu_seconds / num_runs:.1f} ms of CPU time each in all processes"
    )


def bare_forks(mode: str) -> subprocess.Popen[str]:
    """A process that forks as often as it is told."""
    command = [sys.executable, "-s", "-S", "-P", "-B", "-c", BARE, mode]
    env = {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def forks_of(process: subprocess.Popen[str], num_forks: int) -> list[float]:
    """Seconds of each fork of a child that ends at once, until it was waited for."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(f"{num_forks}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def runs_of(sandbox: Sandbox, num_runs: int, gap_seconds: float) -> list[float]:
    """Seconds of each run of four cases."""
    seconds: list[float] = []
    for _ in range(num_runs):
        if gap_seconds:
            time.sleep(gap_seconds)
        start = time.perf_counter()
        sandbox.call(SOURCE, "f", CASES)
        seconds.append(time.perf_counter() - start)
    return seconds


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
