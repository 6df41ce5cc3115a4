"""`agentrl plan calibrate`: the engine's constants from measurements."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from typing_extensions import Doc

from agentrl.cli.plan_flags import check_flags
from agentrl.plan.calibrate import (
    Calibration,
    check_requests_fit,
    choose_rows,
    constants_to_toml,
    fit,
    leave_one_out,
    merge_repeats,
    overhead_bytes,
    read_measurements,
)
from agentrl.plan.configs import find_model
from agentrl.plan.engine import VLLM_0_30_0, Engine
from agentrl.plan.gpus import find_gpu, load_gpus
from agentrl.plan.inputs import Range, check_ranges


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Fit an engine's constants to about five measured rows; report the error on the rows left out."""

    measurements: tyro.conf.Positional[
        Annotated[Path, Doc("CSV: input_tokens, output_tokens, concurrency, output_tokens_per_second")]
    ]
    model: Annotated[str, Doc("the model that was measured")] = "Qwen/Qwen3-8B"
    gpu: Annotated[str, Doc("the GPU that it was measured on")] = "H100"
    gpu_file: Annotated[Path | None, Doc("a TOML file that defines more GPUs")] = None
    rows: Annotated[
        int, Doc("rows to fit on, chosen by their settings; the others test the fit"), Range(1, 1e6, "rows")
    ] = 5
    cache_tokens: Annotated[
        int | None, Doc("tokens of cache that the engine reported at its start"), Range(1, 1e12, "tokens")
    ] = None
    tensor_parallel: Annotated[int, Doc("GPUs of the engine"), Range(1, 1e6, "GPUs")] = 1
    weight_bits: Annotated[Literal[16, 8, 4], Doc("bits a weight in the engine")] = 16
    kv_bits: Annotated[Literal[16, 8, 4], Doc("bits a cached number in the engine")] = 16
    memory_utilization: Annotated[
        float, Doc("share of the GPU's memory that the engine took"), Range(1e-3, 1, "share")
    ] = VLLM_0_30_0.memory_utilization
    name: Annotated[str, Doc("what to call the engine")] = "measured"
    output: Annotated[Path | None, Doc("write the constants here, for --engine-file")] = None


def main(args: list[str]) -> int:
    """Fit, print the constants and the errors, write them where asked; returns the exit status."""
    check_flags(args, (CalibrateOptions,), "a CSV file of measurements")
    options = tyro.cli(CalibrateOptions, args=args, prog="agentrl plan calibrate")
    check_ranges(options)
    measured = read_measurements(options.measurements)
    rows = merge_repeats(measured)
    engine = _engine(options)
    check_requests_fit(engine, rows)
    result = fit(engine, rows, choose_rows(engine, rows, min(options.rows, len(rows))), options.name)
    text = constants_to_toml(result.constants)
    if len(rows) < len(measured):
        print(f"{len(measured)} rows of {len(rows)} settings; repeats are averaged")
    print(f"{len(result.fitted)} rows fitted, {len(result.held_out)} left out\n\n{text}")
    _print_errors(engine, result)
    if result.at_the_edge:
        print(
            f"{', '.join(result.at_the_edge)}: at the end of what is possible, so no engine explains these "
            "rows; check them, --model, --gpu and --tensor-parallel",
            file=sys.stderr,
        )
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
        print(f"wrote {options.output}")
    return 0


def _engine(options: CalibrateOptions) -> Engine:
    # the cache that the engine reported says what its overhead is; else the default engine's stands
    known = options.cache_tokens is None
    constants = replace(
        VLLM_0_30_0,
        memory_utilization=options.memory_utilization,
        overhead_bytes=VLLM_0_30_0.overhead_bytes if known else 0.0,
    )
    engine = Engine(
        shape=find_model(options.model),
        gpu=find_gpu(options.gpu, load_gpus(options.gpu_file)),
        constants=constants,
        tensor_parallel=options.tensor_parallel,
        weight_bytes_each=options.weight_bits / 8,
        kv_bytes_each=options.kv_bits / 8,
    )
    if options.cache_tokens is None:
        return engine
    held = overhead_bytes(engine, options.cache_tokens)
    return replace(engine, constants=replace(constants, overhead_bytes=held))


def _print_errors(engine: Engine, result: Calibration) -> None:
    if result.held_out:
        tested, errors, how = result.held_out, result.held_out_errors, "on the rows left out"
    elif len(result.fitted) > 1:
        tested, errors = result.fitted, leave_one_out(engine, result.fitted)
        how = "on each row, fitted on the others"
    else:
        print("one row was fitted, so nothing tests the fit; measure more rows", file=sys.stderr)
        return
    absolute = [abs(error) for error in errors]
    print(f"error {how}: mean {sum(absolute) / len(absolute):.1%}, largest {max(absolute):.1%}")
    print("input  output  concurrency  measured tokens/s  error")
    for row, error in zip(tested, errors, strict=True):
        settings = f"{row.input_tokens:>5}  {row.output_tokens:>6}  {row.concurrency:>11}"
        print(f"{settings}  {row.output_tokens_per_second:>17,.0f}  {error:>+5.1%}")
