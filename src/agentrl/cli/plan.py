"""`agentrl plan`: what a run will cost, and `agentrl plan calibrate`: the engine's constants from
measurements."""

import difflib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro
from typing_extensions import Doc

from agentrl.cli.plan_output import Answer, Assumption, as_json, as_text
from agentrl.plan.advice import savings, uncertainties
from agentrl.plan.configs import find_model
from agentrl.plan.engine import VLLM_0_30_0, EngineConstants
from agentrl.plan.gpus import find_gpu, load_gpus
from agentrl.plan.hours import Plan, both_schedules, first_order
from agentrl.plan.workload import Generation, Lengths, Schedule, Training, Workload, measured_lengths

_CONSTANTS = (
    "step_seconds",
    "sequence_seconds",
    "bandwidth_share",
    "compute_share",
    "overhead_bytes",
    "memory_utilization",
)
_MEASURED = ("tokens", "sampled", "prompt", "turns", "zero_advantage", "length_cv")  # what trajectories give


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a reinforcement-learning run of a language-model agent will cost, before it is paid for."""

    model: Annotated[str, Doc("a well-known model, the path of a config.json, or a hub name")] = (
        "Qwen/Qwen3-8B"
    )
    gpu: Annotated[str, Doc("a GPU's name")] = "H200"
    gpus: Annotated[int, Doc("GPUs of the run")] = 8
    schedule: Annotated[
        Schedule, Doc("all generate and then all train, or some generate while some train")
    ] = "synchronous"
    parameters: Annotated[float | None, Doc("N of the first-order sums; unset: the model card's number")] = (
        None
    )
    trajectories: Annotated[Path | None, Doc("a trajectory file to take the episodes' shape from")] = None
    gpu_file: Annotated[Path | None, Doc("a TOML file that defines more GPUs")] = None
    engine_file: Annotated[Path | None, Doc("constants that `agentrl plan calibrate` wrote")] = None
    step_seconds: Annotated[float | None, Doc("fixed seconds of a decode step")] = None
    sequence_seconds: Annotated[float | None, Doc("seconds that each sequence adds to a decode step")] = None
    bandwidth_share: Annotated[float | None, Doc("share of the memory bandwidth that decoding reaches")] = (
        None
    )
    compute_share: Annotated[float | None, Doc("share of the peak arithmetic that prefill reaches")] = None
    overhead_bytes: Annotated[float | None, Doc("memory of the engine outside weights and cache")] = None
    memory_utilization: Annotated[float | None, Doc("share of a GPU's memory that the engine takes")] = None
    json: Annotated[bool, Doc("print JSON instead of text")] = False
    html: Annotated[Path | None, Doc("write a self-contained page to this file too")] = None
    workload: tyro.conf.OmitArgPrefixes[Workload] = field(default_factory=Workload)
    generation: tyro.conf.OmitArgPrefixes[Generation] = field(default_factory=Generation)
    training: tyro.conf.OmitArgPrefixes[Training] = field(default_factory=Training)


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Fit an engine's constants to about five measured rows; report the error on the rows left out."""

    measurements: tyro.conf.Positional[
        Annotated[Path, Doc("CSV: input_tokens, output_tokens, concurrency, output_tokens_per_second")]
    ]
    model: Annotated[str, Doc("the model that was measured")] = "Qwen/Qwen3-8B"
    gpu: Annotated[str, Doc("the GPU that it was measured on")] = "H100"
    gpu_file: Annotated[Path | None, Doc("a TOML file that defines more GPUs")] = None
    rows: Annotated[int, Doc("rows to fit on, chosen by their settings; the others test the fit")] = 5
    cache_tokens: Annotated[int | None, Doc("tokens of cache that the engine reported at its start")] = None
    tensor_parallel: Annotated[int, Doc("GPUs of the engine")] = 1
    weight_bits: Annotated[Literal[16, 8], Doc("bits a weight in the engine")] = 16
    name: Annotated[str, Doc("what to call the engine")] = "measured"
    output: Annotated[Path | None, Doc("write the constants here, for --engine-file")] = None


def main(args: list[str]) -> int:
    """Run the command; returns the exit status. Raises ValueError, in one line, for input that cannot be."""
    if args[:1] == ["calibrate"]:
        _check_flags(args[1:], (CalibrateOptions,))
        return calibrate(tyro.cli(CalibrateOptions, args=args[1:], prog="agentrl plan calibrate"))
    _check_flags(args, (PlanOptions, Workload, Generation, Training))
    options = tyro.cli(PlanOptions, args=args, prog="agentrl plan")
    answer = answer_for(options, args)
    if options.html is not None:
        from agentrl.cli.plan_page import as_html

        options.html.write_text(as_html(answer), encoding="utf-8")
    if options.json:
        print(json.dumps(as_json(answer), indent=1))
        return 0
    print(as_text(answer))
    if options.html is not None:
        print(f"\nwrote {options.html}")
    return 0


def _check_flags(args: Sequence[str], owners: tuple[type, ...]) -> None:
    known = {"--help"} | {_flag(entry.name) for owner in owners for entry in fields(owner)}
    for arg in args:
        flag = arg.split("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in known and flag.replace("--no-", "--", 1) not in known:
            nearest = difflib.get_close_matches(flag, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "--help lists them"
            raise ValueError(f"no option {flag}; {hint}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def answer_for(options: PlanOptions, args: Sequence[str] = ()) -> Answer:
    """Everything that the command shows; `args` say which assumptions were given."""
    given = {
        arg.split("=")[0].replace("_", "-").replace("--no-", "--") for arg in args if arg.startswith("--")
    }
    workload, lengths = options.workload, None
    if options.trajectories is not None:
        workload, lengths = episodes_of(options.trajectories, workload, given)
    shape = find_model(options.model)
    if options.parameters is not None:
        shape = replace(shape, card_parameters=options.parameters)
    plan = Plan(
        shape=shape,
        gpu=find_gpu(options.gpu, load_gpus(options.gpu_file)),
        gpus=options.gpus,
        workload=workload,
        generation=options.generation,
        training=options.training,
        constants=_constants(options),
        schedule=options.schedule,
        lengths=lengths,
    )
    return Answer(
        plan=plan,
        first_order=first_order(plan),
        estimates=both_schedules(plan),
        savings=savings(plan),
        uncertainties=uncertainties(plan),
        assumptions=_assumptions(plan, given, measured=options.trajectories is not None),
    )


def _constants(options: PlanOptions) -> EngineConstants:
    constants = VLLM_0_30_0
    if options.engine_file is not None:
        from agentrl.plan.calibrate import constants_from_toml

        constants = constants_from_toml(options.engine_file.read_text(encoding="utf-8"))
    changed = {name: getattr(options, name) for name in _CONSTANTS if getattr(options, name) is not None}
    return replace(constants, **changed)


def episodes_of(path: Path, workload: Workload, given: set[str]) -> tuple[Workload, Lengths | None]:
    """The workload with the shape of the trajectories in a file, where no flag gives it, and their lengths.

    Tokens, sampled tokens, prompt (before the first action) and turns (runs of action tokens) are means; the
    share without signal counts the trajectories of groups whose rewards are all equal. The lengths are
    relative, after the prompt; None where --length-cv is given.
    """
    import agentrl

    trajectories: list[Any] = agentrl.load_trajectories(path)
    if not trajectories:
        raise ValueError(f"{path} holds no trajectories")
    groups: dict[str, list[float]] = {}
    prompts: list[int] = []
    turns: list[int] = []
    for trajectory in trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory.reward)
        mask = trajectory.action_mask
        runs = int(((mask[1:] == 1) & (mask[:-1] == 0)).sum()) + int(mask[:1].sum())
        turns.append(runs)
        prompts.append(1 + int(mask.argmax()) if runs else trajectory.num_tokens)
    count = len(trajectories)
    silent = sum(len(rewards) for rewards in groups.values() if min(rewards) == max(rewards))
    tokens = sum(t.num_tokens for t in trajectories) / count
    sampled = sum(t.num_actions for t in trajectories) / count
    after_prompt = [max(1, t.num_tokens - prompt) for t, prompt in zip(trajectories, prompts, strict=True)]
    lengths = measured_lengths(after_prompt, 64)
    measured: dict[str, Any] = {
        "tokens": tokens,
        "sampled": sampled,
        "prompt": min(sum(prompts) / count, tokens - sampled),
        "turns": max(1, round(sum(turns) / count)),
        "length_cv": math.sqrt(max(0.0, lengths.squared_mean - 1)),
        "zero_advantage": min(silent / count, 0.95),
    }
    kept = {name: value for name, value in measured.items() if _flag(name) not in given}
    return replace(workload, **kept), None if "--length-cv" in given else lengths


def _assumptions(plan: Plan, given: set[str], measured: bool) -> list[Assumption]:
    found: list[Assumption] = []
    from_file = _MEASURED if measured else ()
    for part in (plan.workload, plan.generation, plan.training):
        for name, meaning in _meanings(type(part)).items():
            value = getattr(part, name)
            if value is None or isinstance(value, bool):
                value = {True: "yes", False: "no", None: "unset"}[value]
            origin = "given" if _flag(name) in given else "measured" if name in from_file else "assumed"
            found.append(Assumption(_flag(name), value, meaning, origin))
    meanings = _meanings(PlanOptions)
    for name in _CONSTANTS:
        origin = "given" if _flag(name) in given else "engine"
        found.append(Assumption(_flag(name), getattr(plan.constants, name), meanings[name], origin))
    return found


def _meanings(owner: type) -> dict[str, str]:
    # field -> what its Doc says
    hints = get_type_hints(owner, include_extras=True)
    found: dict[str, str] = {}
    for entry in fields(owner):
        docs = [note for note in getattr(hints[entry.name], "__metadata__", ()) if isinstance(note, Doc)]
        if docs:
            found[entry.name] = docs[0].documentation
    return found


def calibrate(options: CalibrateOptions) -> int:
    """Fit, print the constants and the errors, and write the constants where asked; returns the exit
    status."""
    from agentrl.plan.calibrate import (
        choose_rows,
        constants_to_toml,
        fit,
        leave_one_out,
        overhead_bytes,
        read_measurements,
    )
    from agentrl.plan.engine import Engine

    rows = read_measurements(options.measurements)
    engine = Engine(
        shape=find_model(options.model),
        gpu=find_gpu(options.gpu, load_gpus(options.gpu_file)),
        constants=VLLM_0_30_0,
        tensor_parallel=options.tensor_parallel,
        weight_bytes_each=options.weight_bits / 8,
    )
    if options.cache_tokens is not None:
        held = overhead_bytes(engine, options.cache_tokens)
        engine = replace(engine, constants=replace(engine.constants, overhead_bytes=max(0.0, held)))
    result = fit(engine, rows, choose_rows(engine, rows, min(options.rows, len(rows))), options.name)
    text = constants_to_toml(result.constants)
    print(f"{len(result.fitted)} rows fitted, {len(result.held_out)} left out\n\n{text}")
    if result.held_out:
        tested, errors, how = result.held_out, result.held_out_errors, "on the rows left out"
    elif len(rows) > 1:
        tested, errors, how = (
            result.fitted,
            leave_one_out(engine, result.fitted),
            "on each row, fitted on the others",
        )
    else:
        print("one row was fitted, so nothing tests the fit; measure more rows", file=sys.stderr)
        tested, errors, how = (), (), ""
    if errors:
        absolute = [abs(error) for error in errors]
        print(f"error {how}: mean {sum(absolute) / len(absolute):.1%}, largest {max(absolute):.1%}")
        print("input  output  concurrency  measured tokens/s  error")
    for row, error in zip(tested, errors, strict=True):
        settings = f"{row.input_tokens:>5}  {row.output_tokens:>6}  {row.concurrency:>11}"
        print(f"{settings}  {row.output_tokens_per_second:>17,.0f}  {error:>+5.1%}")
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
        print(f"wrote {options.output}")
    return 0
