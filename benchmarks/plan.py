"""The calibrated engine's error on measured rows that it was not fitted to, and the start of `agentrl plan`.

    python benchmarks/plan.py decode_qwen3_8b_h100.json [--random 200] [--seed 0]

The file holds `points` (input tokens, output tokens, concurrency, output tokens/s, ...), `kv_cache_tokens`
and `source`; rows of Qwen3-8B in bfloat16 on one H100. Prints Markdown.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentrl.plan.calibrate import (
    Calibration,
    Measurement,
    choose_rows,
    constants_to_toml,
    fit,
    overhead_bytes,
)
from agentrl.plan.configs import find_model
from agentrl.plan.engine import VLLM_0_30_0, Engine
from agentrl.plan.gpus import find_gpu
from agentrl.plan.roofline import decode_tokens_per_second
from results import commit


def line(name: str, errors: list[float]) -> str:
    absolute = np.abs(errors)
    figures = (absolute.mean(), np.median(absolute), absolute.max())
    return f"| {name} | {len(errors)} | " + " | ".join(f"{figure:.1%}" for figure in figures) + " |"


def first_order_errors(engine: Engine, rows: list[Measurement]) -> list[float]:
    kv = engine.shape.kv_bytes_per_token()
    return [
        decode_tokens_per_second(
            8.2e9, kv, engine.gpu.bytes_per_second, r.concurrency, r.input_tokens + r.output_tokens / 2
        )
        / r.output_tokens_per_second
        - 1
        for r in rows
    ]


def random_choices(engine: Engine, rows: list[Measurement], count: int, seed: int) -> list[float]:
    generator = np.random.default_rng(seed)
    chosen = [generator.choice(len(rows), 5, replace=False).tolist() for _ in range(count)]
    return [fit(engine, rows, five).mean_error for five in chosen]


def start_seconds(repeats: int = 10) -> tuple[float, float]:
    """(wall, CPU) seconds of one `agentrl plan`, each the median of a few."""
    walls: list[float] = []
    cpus: list[float] = []
    for _ in range(repeats):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, "-m", "agentrl", "plan"], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - start)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return float(np.median(walls)), float(np.median(cpus))


def row_table(result: Calibration) -> str:
    fitted = ", ".join(f"{r.input_tokens}/{r.output_tokens}/{r.concurrency}" for r in result.fitted)
    rows = [
        f"| {r.input_tokens} | {r.output_tokens} | {r.concurrency} | {r.output_tokens_per_second:,.0f} "
        f"| {r.output_tokens_per_second * (1 + e):,.0f} | {e:+.1%} |"
        for r, e in zip(result.held_out, result.held_out_errors, strict=True)
    ]
    head = (
        "| input | output | concurrency | measured tokens/s | predicted | error |\n|--:|--:|--:|--:|--:|--:|"
    )
    return f"fitted on (input/output/concurrency): {fitted}\n\n{head}\n" + "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--random", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    data = json.loads(args.data.read_text())
    rows = [Measurement(int(p[0]), int(p[1]), int(p[2]), float(p[3])) for p in data["points"]]
    engine = Engine(shape=find_model(data["model"]), gpu=find_gpu("H100"), constants=VLLM_0_30_0)
    held = overhead_bytes(engine, data["kv_cache_tokens"])
    engine = replace(engine, constants=replace(engine.constants, overhead_bytes=held))
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(f"commit {commit()}, {machine}, seed {args.seed}\nsource: {data['source']}\n")
    result = fit(engine, rows, choose_rows(engine, rows), data["engine"])
    everything = fit(engine, rows, range(len(rows)), data["engine"])
    own = [
        replace(engine, constants=everything.constants).serving_tokens_per_second(
            r.input_tokens, r.output_tokens, r.concurrency
        )
        / r.output_tokens_per_second
        - 1
        for r in rows
    ]
    chance = np.array(random_choices(engine, rows, args.random, args.seed))
    print("| estimate | rows | mean error | median | largest |\n|---|--:|--:|--:|--:|")
    print(line("first order, no row fitted", first_order_errors(engine, rows)))
    print(line("calibrated on the 5 chosen rows, the others", list(result.held_out_errors)))
    print(line("calibrated on all rows, the same rows", own))
    low, middle, high = np.percentile(chance, [5, 50, 95])
    print(
        f"\n{args.random} random choices of five rows, mean error on the other 36: median {middle:.1%}, "
        f"5 % to 95 % {low:.1%} to {high:.1%}, worst {chance.max():.1%}; "
        f"{np.mean(chance <= 0.1):.0%} at most 10 %\n"
    )
    print(f"```toml\n{constants_to_toml(result.constants)}```\n\n{row_table(result)}\n")
    wall, cpu = start_seconds()
    print(f"`agentrl plan`, from start to end: {wall:.2f} s of wall clock, {cpu:.2f} s of CPU (median of 10)")


if __name__ == "__main__":
    main()
