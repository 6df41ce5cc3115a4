"""`agentrl verify`: whether packing, splitting and the head are exact, on your model and trajectories."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from typing_extensions import Doc

if TYPE_CHECKING:
    from agentrl.data.records import BadRecord
    from agentrl.data.trajectory import Trajectory
    from agentrl.models.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Options:
    """Whether packing, splitting and the head are exact, on your model and your trajectories.

    Exit status: 0 if every line passes, 1 if one FAILs, 2 where nothing could be compared.
    """

    model: Annotated[
        str, Doc("a Hugging Face model (folder, name or .gguf file), or a run directory of agentrl train")
    ]
    trajectories: Annotated[
        tuple[Path, ...], Doc("trajectory files of any supported kind; unset: sampled from the model")
    ] = ()
    tokenizer: Annotated[
        str | None, Doc("a Hugging Face tokenizer for files that hold text; unset: the model's")
    ] = None
    count: Annotated[int, Doc("trajectories to compare, the first with action tokens")] = 4
    cut: Annotated[int | None, Doc("keep this many tokens of each")] = None
    max_tokens: Annotated[
        int | None, Doc("tokens of a row; unset: all trajectories in one, up to 16,384")
    ] = None
    temperature: Annotated[float, Doc("that the trajectories were sampled at")] = 1.0
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "float64"], Doc("to compute in; auto: the model's")
    ] = "auto"
    device: Annotated[str, Doc("to compute on")] = "cpu"
    gradients: Annotated[bool, Doc("compare gradients too")] = True
    simulate: Annotated[
        Literal["leak", "positions", "local-mean"] | None, Doc("show what a classic bug looks like")
    ] = None
    seed: Annotated[int, Doc("of random advantages and of sampled trajectories")] = 0
    skip_bad: Annotated[bool, Doc("read past records that cannot be read; they are counted and listed")] = (
        False
    )
    allow_pickle: Annotated[bool, Doc("read pickles (slime dumps), which run whatever code they hold")] = (
        False
    )
    json: Annotated[bool, Doc("print JSON instead of a table")] = False


def main(args: list[str]) -> int:
    """Run the command; returns the exit status. Raises ValueError, in one line, for input that cannot be."""
    options = tyro.cli(Options, args=args, prog="agentrl verify")
    for name in ("count", "cut", "max_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    from agentrl.cli.verify_output import as_json, print_table
    from agentrl.diagnose.verify import VerifyOptions, verify

    against = VerifyOptions(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        gradients=options.gradients,
        simulate=options.simulate,
        seed=options.seed,
    )
    skipped: list[BadRecord] = []
    with progress_bar() as report:
        report("loading the model", 0.0)
        policy = _load_policy(options)
        report("reading or sampling trajectories", 0.0)
        trajs, own_sampler = _load_trajectories(options, policy, skipped)
        found = verify(policy, trajs, against, own_sampler=own_sampler, progress=report)
    if options.json:
        print(json.dumps(as_json(found, skipped), indent=1))
    else:
        print_table(found)
    for bad in skipped:
        print(f"skipped {bad}", file=sys.stderr)
    return 0 if found.passed else 1


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """Shows on standard error what is being compared, how much is done, and the seconds that are left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    start, last = time.monotonic(), ""
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0, left="")

        def report(stage: str, share: float) -> None:
            nonlocal start, last
            if share == 0.0:
                start = time.monotonic()
            left = time_left(time.monotonic() - start, share)
            bar.update(task, description=stage, completed=share, left=left)
            if stage != last and not console.is_terminal:
                print(", ".join(filter(None, (f"{share:4.0%} {stage}", left))), file=sys.stderr, flush=True)
            last = stage

        yield report


def time_left(seconds: float, share: float) -> str:
    """What is left where `share` of the work took so many seconds: '2:05 left'; '' before a tenth is done."""
    if share < 0.1:
        return ""
    left = round(seconds * (1 - share) / share)
    return f"{left // 60}:{left % 60:02} left"


def _is_run(model: str) -> bool:
    return (Path(model) / "config.toml").is_file()


def _load_policy(options: Options) -> "Policy":
    import torch

    from agentrl.train.distributed import own_device

    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    device = own_device(options.device)
    if _is_run(options.model):
        from agentrl.train.directory import RunDirectory
        from agentrl.train.run import load_policy

        trained, _ = load_policy(RunDirectory(Path(options.model)))
        trained.module.to(device=device, dtype=dtype)
        return trained
    from agentrl.models.load import load_hf_policy

    policy = load_hf_policy(options.model, dtype)
    policy.module.to(device)
    return policy


def _load_trajectories(
    options: Options, policy: "Policy", skipped: "list[BadRecord]"
) -> "tuple[list[Trajectory] | None, bool]":
    """(trajectories, whether this very model sampled them); None where `verify` is to sample them."""
    if not options.trajectories:
        return (_play(options, policy), True) if _is_run(options.model) else (None, True)
    from agentrl.data.importers import import_trajectories

    tokenizer: Any = _LazyTokenizer(options)
    source = import_trajectories(
        options.trajectories,
        tokenizer=tokenizer,
        vocab_size=policy.head().weight.shape[0],
        allow_pickle=options.allow_pickle,
        skipped=skipped if options.skip_bad else None,
    )
    trajs: list[Trajectory] = []
    num_read = 0
    for traj in source:
        num_read += 1
        short = _cut(traj, options.cut)
        if short.num_actions:
            trajs.append(short)
        if len(trajs) == options.count:
            break
    if not trajs:
        hint = "" if options.cut is None else f" in their first {options.cut:,} tokens; raise --cut"
        raise ValueError(f"none of the {num_read} trajectories has an action token{hint}")
    return trajs, False


class _LazyTokenizer:
    """The tokenizer of the options, loaded when the first text comes."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._loaded: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._loaded is None:
            from agentrl.data.chat import load_tokenizer
            from agentrl.models.load import load_hf_tokenizer

            options = self._options
            if options.tokenizer is not None:
                self._loaded = load_tokenizer(options.tokenizer)
            elif _is_run(options.model):
                raise ValueError("a run's model reads the words of its gym, not this text; name --tokenizer")
            else:
                self._loaded = load_hf_tokenizer(options.model)
        return getattr(self._loaded, name)


def _play(options: Options, policy: "Policy") -> "list[Trajectory]":
    """Episodes of the run's own tasks, groups of two, sampled at the option's temperature."""
    import torch

    from agentrl.gym.env import make_env
    from agentrl.gym.tasks import make_tasks
    from agentrl.gym.tokenizer import build_tokenizer
    from agentrl.rollout.episode import sample_groups
    from agentrl.train.directory import RunDirectory

    cfg = RunDirectory(Path(options.model)).load_config().rl
    cfg = replace(cfg, group_size=2, temperature=options.temperature)
    tasks, tok = make_tasks("train"), build_tokenizer(make_tasks("all"))
    generator = torch.Generator().manual_seed(options.seed)
    num_tasks = min(len(tasks), -(-options.count // 2))
    trajs = sample_groups(policy, lambda: make_env(cfg), tasks[:num_tasks], tok, cfg, generator)
    return [_cut(traj, options.cut) for traj in trajs[: options.count]]


def _cut(traj: "Trajectory", num_tokens: int | None) -> "Trajectory":
    """The trajectory's first `num_tokens` tokens."""
    if num_tokens is None or traj.num_tokens <= num_tokens:
        return traj
    return replace(
        traj,
        ids=traj.ids[:num_tokens],
        action_mask=traj.action_mask[: num_tokens - 1],
        sample_logp=traj.sample_logp[: num_tokens - 1],
    )
