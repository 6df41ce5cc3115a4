"""`agentrl plan`: what a run will cost; `plan calibrate` is in `plan_calibrate`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Optional

import tyro
from typing_extensions import Doc

from agentrl.cli.plan_episodes import Episodes, episodes_of
from agentrl.cli.plan_flags import check_flags, given_flags
from agentrl.cli.plan_notes import notes
from agentrl.cli.plan_output import Answer, Assumption, as_text
from agentrl.plan.advice import savings, uncertainties
from agentrl.plan.configs import find_model
from agentrl.plan.engine import VLLM_0_30_0, EngineConstants, constants_from_toml
from agentrl.plan.gpus import find_gpu, load_gpus
from agentrl.plan.hours import Plan, both_schedules, first_order
from agentrl.plan.inputs import Range, check_ranges, flag_of, notes_of, ranges_of, read_text
from agentrl.plan.workload import Generation, Schedule, Training, Workload

# tyro checks the default of an `X | None` with typeguard, which takes a tenth of a second to load
Number = Optional[float]  # noqa: UP045
File = Optional[Path]  # noqa: UP045


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
    parameters: Annotated[
        Number,
        Doc("N of the first-order sums; unset: the model card's number"),
        Range(1e3, 1e15, "parameters"),
    ] = None
    trajectories: Annotated[File, Doc("a trajectory file to take the episodes' shape from")] = None
    skip_bad: Annotated[bool, Doc("read past records of that file that cannot be read")] = False
    gpu_file: Annotated[File, Doc("a TOML file that defines more GPUs")] = None
    engine_file: Annotated[File, Doc("constants that `agentrl plan calibrate` wrote")] = None
    step_seconds: Annotated[Number, Doc("fixed seconds of a decode step")] = None
    sequence_seconds: Annotated[Number, Doc("seconds that each sequence adds to a decode step")] = None
    bandwidth_share: Annotated[Number, Doc("share of the memory bandwidth that decoding reaches")] = None
    compute_share: Annotated[Number, Doc("share of the peak arithmetic that prefill reaches")] = None
    overhead_bytes: Annotated[Number, Doc("memory of the engine outside weights and cache")] = None
    memory_utilization: Annotated[Number, Doc("share of a GPU's memory that the engine takes")] = None
    json: Annotated[bool, Doc("print JSON instead of text")] = False
    html: Annotated[File, Doc("write a self-contained page to this file too")] = None
    workload: tyro.conf.OmitArgPrefixes[Workload] = field(default_factory=Workload)
    generation: tyro.conf.OmitArgPrefixes[Generation] = field(default_factory=Generation)
    training: tyro.conf.OmitArgPrefixes[Training] = field(default_factory=Training)


def main(args: list[str]) -> int:
    """Run the command; returns the exit status. Raises ValueError, in one line, for input that cannot be."""
    if args[:1] == ["calibrate"]:
        from agentrl.cli.plan_calibrate import main as calibrate

        return calibrate(args[1:])
    check_flags(args, (PlanOptions, Workload, Generation, Training))
    options = tyro.cli(PlanOptions, args=args, prog="agentrl plan")
    answer = answer_for(options, args)
    if options.html is not None:
        from agentrl.cli.plan_page import as_html

        options.html.write_text(as_html(answer), encoding="utf-8", errors="backslashreplace")
    if options.json:
        from agentrl.cli.plan_json import as_json

        print(json.dumps(as_json(answer), indent=1))
        return 0
    print(as_text(answer))
    if options.html is not None:
        print(f"\nwrote {options.html}")
    return 0


def answer_for(options: PlanOptions, args: Sequence[str] = ()) -> Answer:
    """Everything that the command shows; `args` say which assumptions were given."""
    given = given_flags(args)
    check_ranges(options)
    episodes = Episodes(workload=options.workload)
    if options.trajectories is not None:
        episodes = episodes_of(options.trajectories, options.workload, given, options.skip_bad)
    shape = find_model(options.model)
    if options.parameters is not None:
        shape = replace(shape, card_parameters=options.parameters)
    plan = Plan(
        shape=shape,
        gpu=find_gpu(options.gpu, load_gpus(options.gpu_file)),
        gpus=options.gpus,
        workload=episodes.workload,
        generation=options.generation,
        training=options.training,
        constants=_constants(options),
        schedule=options.schedule,
        lengths=episodes.lengths,
    )
    estimates = both_schedules(plan)
    return Answer(
        plan=plan,
        first_order=first_order(plan),
        estimates=estimates,
        notes=[*episodes.notes, *notes(plan, estimates)],
        savings=savings(plan),
        uncertainties=uncertainties(plan),
        assumptions=_assumptions(plan, given, episodes.measured),
    )


def _constants(options: PlanOptions) -> EngineConstants:
    constants = VLLM_0_30_0
    if options.engine_file is not None:
        constants = constants_from_toml(read_text(options.engine_file), str(options.engine_file))
    changed = {
        name: getattr(options, name)
        for name in ranges_of(EngineConstants)
        if getattr(options, name) is not None
    }
    return replace(constants, **changed)


def _assumptions(plan: Plan, given: set[str], measured: frozenset[str]) -> list[Assumption]:
    found = _run_assumptions(plan, given)
    for part in (plan.workload, plan.generation, plan.training):
        units = ranges_of(type(part))
        for name, meaning in notes_of(type(part), Doc).items():
            value = getattr(part, name)
            if value is None or isinstance(value, bool):
                value = {True: "yes", False: "no", None: "unset"}[value]
            flag = flag_of(name)
            origin = "given" if flag in given else "measured" if name in measured else "assumed"
            unit = units[name].unit if name in units else "bits" if name.endswith("_bits") else ""
            found.append(Assumption(flag, value, unit, meaning.documentation, origin))
    meanings = notes_of(PlanOptions, Doc)
    for name, wanted in ranges_of(EngineConstants).items():
        flag, value = flag_of(name), getattr(plan.constants, name)
        origin = "given" if flag in given else "engine"
        found.append(Assumption(flag, value, wanted.unit, meanings[name].documentation, origin))
    return found


def _run_assumptions(plan: Plan, given: set[str]) -> list[Assumption]:
    # what the run is made on: the model, the GPU with its figures, how many, and how they are used
    gpu, size = plan.gpu, plan.shape.nominal_parameters
    figures = (
        f"{gpu.flops_per_second / 1e12:,.0f} TFLOP/s of dense bfloat16, "
        f"{gpu.bytes_per_second / 1e9:,.0f} GB/s, {gpu.memory_bytes / 1e9:.1f} GB ({gpu.source})"
    )
    meanings = {name: note.documentation for name, note in notes_of(PlanOptions, Doc).items()}
    rows: list[tuple[str, float | str, str, str, str]] = [
        ("model", plan.shape.name, "", meanings["model"], "assumed"),
        ("parameters", size, "parameters", "N of the first-order sums", "model"),
        ("gpu", gpu.name.replace(" ", ""), "", figures, "assumed"),
        ("gpus", plan.gpus, "GPUs", meanings["gpus"], "assumed"),
        ("schedule", plan.schedule, "", meanings["schedule"], "assumed"),
    ]
    return [
        Assumption(flag_of(name), value, unit, meaning, "given" if flag_of(name) in given else origin)
        for name, value, unit, meaning, origin in rows
    ]
