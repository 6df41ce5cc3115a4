"""`agentrl verify`: whether packing, splitting and the head are exact, on your model and trajectories."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from typing_extensions import Doc

if TYPE_CHECKING:
    from agentrl.data.records import BadRecord
    from agentrl.data.trajectory import Trajectory
    from agentrl.diagnose.verify import Statistic, Verification
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

    from agentrl.diagnose.verify import VerifyOptions, verify

    against = VerifyOptions(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        gradients=options.gradients,
        simulate=options.simulate,
        seed=options.seed,
    )
    report = _reporter()
    report("loading the model")
    policy = _load_policy(options)
    skipped: list[BadRecord] = []
    trajs, own_sampler = _load_trajectories(options, policy, skipped)
    found = verify(policy, trajs, against, own_sampler=own_sampler, progress=report)
    if options.json:
        print(json.dumps(as_json(found, skipped), indent=1))
    else:
        print_table(found)
    for bad in skipped:
        print(f"skipped {bad}", file=sys.stderr)
    return 0 if found.passed else 1


def _reporter() -> Callable[[str], None]:
    """Says on standard error what is being computed, and the seconds since the start."""
    start = time.monotonic()

    def report(stage: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {stage}", file=sys.stderr, flush=True)

    return report


def _is_run(model: str) -> bool:
    return (Path(model) / "config.toml").is_file()


def _load_policy(options: Options) -> "Policy":
    import torch

    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise ValueError(f"--device {options.device}: {str(error).splitlines()[0]}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: this machine has no CUDA device; leave it out")
    if _is_run(options.model):
        from agentrl.train.run import RunDirectory, load_policy

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
    from agentrl.train.run import RunDirectory

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


def _number(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    return "0" if value == 0 else f"{value:.1e}"


def _cells(statistics: "tuple[Statistic, ...]") -> tuple[str, str]:
    """What was measured and what is allowed, a statistic a line."""
    measured, allowed = [], []
    for s in statistics:
        unit = " nats" if s.unit == "nats" else ""
        measured.append(f"{s.name} {_number(s.measured, s.unit)}{unit}")
        allowed.append("-" if s.allowed is None else f"{_number(s.allowed, s.unit)}{unit}")
    return "\n".join(measured), "\n".join(allowed)


def print_table(found: "Verification") -> None:
    """One table of all checks on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    dtype = str(found.dtype).removeprefix("torch.")
    console.print(
        f"{found.num_trajectories:,} trajectories, {found.num_tokens:,} tokens, {found.num_actions:,} action "
        f"tokens; prefix trees save {found.tree_share:.0%} of the positions",
        highlight=False,
        soft_wrap=True,
    )
    if found.simulated is not None:
        console.print(f"Simulated bug: {found.simulated}. The lines that FAIL show it.", highlight=False)
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("", ratio=1, overflow="fold")
    table.add_column("measured", no_wrap=True)
    table.add_column(f"allowed for {dtype}", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what it means", ratio=2, overflow="fold")
    for check in found.checks:
        verdict = Text("pass", "green") if check.passed else Text("FAIL", "bold red")
        table.add_row(check.name, *_cells(check.statistics), verdict, check.meaning)
    console.print(table, highlight=False)
    failed = found.failed
    verdict = f"{len(failed)} of {len(found.checks)} lines FAIL." if failed else "Every line passes."
    console.print(verdict, highlight=False)


def as_json(found: "Verification", skipped: "list[BadRecord]") -> dict[str, Any]:
    """The verification as plain values."""
    return {
        "passed": found.passed,
        "simulated": found.simulated,
        "dtype": str(found.dtype).removeprefix("torch."),
        "num_trajectories": found.num_trajectories,
        "num_tokens": found.num_tokens,
        "num_actions": found.num_actions,
        "tree_share": found.tree_share,
        "off_by_quarter": found.profile.off_by_quarter,
        "gap_by_quarter": found.profile.gap_by_quarter,
        "checks": [
            {
                "name": check.name,
                "passed": check.passed,
                "statistics": [
                    {"name": s.name, "measured": s.measured, "allowed": s.allowed, "unit": s.unit}
                    for s in check.statistics
                ],
                "meaning": check.meaning,
            }
            for check in found.checks
        ],
        "skipped": [str(bad) for bad in skipped],
    }
