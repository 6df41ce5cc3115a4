"""`agentrl train`: the supervised base learns to fix bugs by reinforcement."""

import argparse
import copy
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from agentrl.train.config import RunConfig, load_config

MANY_TRUNCATED = 0.5  # share of episodes without tokens left from which the closing table advises more

if TYPE_CHECKING:
    import torch

    from agentrl.train.directory import RunDirectory
    from agentrl.train.distributed import Ranks


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train an agent to fix bugs: supervised base, reinforcement learning, held-out evaluation.

    --model trains a Hugging Face causal language model instead of the small embedded one.
    Writes a run directory with config.toml, metrics.jsonl, checkpoints and the final model. Stopped with
    Ctrl-C, or killed, it continues with --resume to exactly the same result. The options from --seed on are
    the [rl] of config.toml: they determine what a run learns, and are fixed when it starts.
    """

    run: Annotated[tyro.conf.OmitArgPrefixes[RunConfig], tyro.conf.arg(name="")] = field(
        default_factory=RunConfig
    )
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """TOML file with settings, as in a run's config.toml; flags override it."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Directory of the new run. Default: runs/ and the time."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Directory of a run to continue; it keeps its model and [rl], flags override its other settings."""


def parse(args: list[str]) -> Options:
    """The options: defaults, overridden by --config or the run that --resume names, overridden by flags."""
    from agentrl.train.directory import RunDirectory
    from agentrl.train.start import resolve_model

    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    files.add_argument("--config", type=Path)
    files.add_argument("--resume", type=Path)
    try:
        given, _ = files.parse_known_args(args)
    except argparse.ArgumentError:
        given = argparse.Namespace(config=None, resume=None)  # tyro says below what is wrong
    if given.config is not None and given.resume is not None:
        raise ValueError("--resume continues with the run's own settings; leave --config out")
    config = RunConfig()
    if given.config is not None:
        if given.config.is_dir():
            raise ValueError(f"--config {given.config}: a folder, not a TOML file; --resume continues a run")
        config = load_config(given.config)
    if given.resume is not None:
        config = RunDirectory(given.resume).load_config()
    options = tyro.cli(Options, prog="agentrl train", args=args, default=Options(run=config))
    if options.resume is not None and options.run_dir is not None:
        raise ValueError("--resume continues in its own directory; leave --run-dir out")
    model = resolve_model(options.run.model)
    if options.resume is not None and model != config.model:
        raise ValueError(f"the run started from {config.model or 'the TinyAgent'}; leave --model out")
    for name in ("instructions", "chat_template"):
        if options.resume is not None and getattr(options.run, name) != getattr(config, name):
            flag = name.replace("_", "-")
            raise ValueError(f"the run started with another --{flag}, which cannot change; leave it out")
    return replace(options, run=replace(options.run, model=model))


class StopRequest:
    """Set by SIGINT or SIGTERM; a second signal ends the process at once, as without a handler."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __call__(self) -> bool:
        """Whether a signal came."""
        return self.signum is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen while the block runs (only the main thread can)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signums = (signal.SIGINT, signal.SIGTERM)
        previous = {signum: signal.getsignal(signum) for signum in signums}

        def note(signum: int, frame: FrameType | None) -> None:
            self.signum = signum
            for each, handler in previous.items():
                signal.signal(each, handler)
            print("\nstopping after this step", file=sys.stderr, flush=True)

        for signum in signums:
            signal.signal(signum, note)
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)


class Display:
    """A live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self.console, self.total_steps = console, total_steps
        self.bar: Progress | None = None
        self._seconds = 0.0
        self._num_steps = 0

    def phase(self, name: str) -> None:
        """A phase begins."""
        self.close()
        if name == "training" and self.console.is_terminal:
            self.bar = Progress(
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self.console,
            )
            self.bar.start()
            self.bar.add_task("training", total=self.total_steps, figures="")
        else:
            self.console.print(name)

    def base(self, step: int, num_steps: int) -> None:
        """A step of the supervised base is done, which is only trained where no cache holds it."""
        if step % (num_steps // 5) == 0:
            self.console.print(
                f"  learning from demonstrations, step {step:,}/{num_steps:,}", highlight=False
            )

    def step(self, record: dict[str, Any]) -> None:
        """A step is done."""
        seconds = record["seconds_sampling"] + record["seconds_training"]
        self._seconds += seconds
        self._num_steps += 1
        rate = "no episode played" if record["pass_rate"] is None else f"pass rate {record['pass_rate']:.2f}"
        figures = f"{rate}  {record['tokens'] / max(seconds, 1e-9):,.0f} tokens/s"
        if not record["updated"]:
            figures += "  no update"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=record["step"], figures=figures)
            return
        left = (self.total_steps - record["step"]) * self._seconds / self._num_steps
        self.console.print(
            f"step {record['step']:>3}/{self.total_steps}  {figures}  {left:,.0f} s left",
            highlight=False,
            soft_wrap=True,
        )

    def close(self) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def summary_table(summary: dict[str, Any], path: Path) -> Table:
    """The closing table of a run."""
    table = Table(title="run finished", title_justify="left", show_header=False)
    before, after = summary["pass_rate_before"], summary["pass_rate_after"]
    rows = {
        "held-out pass rate": f"{before:.2f} before, {after:.2f} after",
        "steps": f"{summary['steps']:,}, of which {summary['updates']:,} with an update",
        "episodes": f"{summary['episodes']:,}, of which {summary['zero_adv_frac']:.0%} wasted: no gradient",
        "tokens": f"{summary['tokens']:,}",
        "seconds sampling": f"{summary['seconds_sampling']:.1f}",
        "seconds training": f"{summary['seconds_training']:.1f}",
        "seconds evaluating": f"{summary['seconds_evaluating']:.1f}",
        "run directory": str(path),
    }
    truncated = summary["truncated_episodes"] / max(summary["episodes"], 1)
    if truncated:
        advice = "; raise --max-tokens" if truncated >= MANY_TRUNCATED else ""
        rows["out of tokens"] = f"{truncated:.0%} of the episodes{advice}"
    if summary["errored_episodes"]:
        rows["episodes that broke"] = f"{summary['errored_episodes']:,}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _prepare(options: Options, path: Path) -> "RunDirectory":
    """The run's directory, checked before anything expensive; nothing is created yet."""
    from agentrl.train.directory import RunDirectory

    run = RunDirectory(path)
    if options.resume is not None:
        with run.locked():
            run.load_latest(options.run)
    else:
        run.check_free()
    return run


def main(args: list[str]) -> int:
    """Run the command; 0 when the run finished, 128 + the signal's number when one stopped it.

    Started by torchrun, every process runs it, and together they train one policy.
    """
    options = parse(args)
    config = options.run
    path = options.resume or options.run_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S")

    from torch.distributed import is_torchelastic_launched

    from agentrl.train.distributed import ONE_RANK, RankLost, contact, own_device, process_group

    device = own_device(config.device)  # before anything expensive
    is_plain = config.compute_dtype == "float32" and not config.checkpoint_activations
    if is_plain and not is_torchelastic_launched():
        return _train(options, _prepare(options, path), ONE_RANK, device)
    with process_group(device) as ranks:
        run = ranks.first(lambda: _prepare(options, path))
        try:
            with contact(ranks.rank):
                return _train(options, run, ranks, device)
        except RankLost as error:
            print(f"agentrl: {error}\n  agentrl train --resume {run.path}", file=sys.stderr, flush=True)
            return 1


def _train(options: Options, run: "RunDirectory", ranks: "Ranks", device: "torch.device") -> int:
    """Train on this rank."""
    config = options.run

    import torch
    import torch.distributed as dist

    from agentrl.gym.tasks import make_tasks
    from agentrl.models.policy import Policy
    from agentrl.rollout.episode import TextTokenizer
    from agentrl.train.curriculum import make_curriculum
    from agentrl.train.distributed import shard_policy
    from agentrl.train.evaluate import evaluate
    from agentrl.train.loop import bugfix_trainer
    from agentrl.train.run import Hooks, train_run
    from agentrl.train.start import load_start, load_tokenizer

    torch.set_num_threads(config.threads)
    console = Console(quiet=not ranks.is_first)
    display = Display(console, config.steps)
    heldout = make_tasks("heldout")
    display.phase("preparing the supervised base" if config.model is None else f"loading {config.model}")

    def start() -> tuple[Policy, TextTokenizer]:
        tok = load_tokenizer(config)
        return load_start(config.model, tok, on_step=display.base), tok

    # Made or fetched on the first rank, then read from its cache by the others.
    made = [start()] if ranks.is_first else []
    ranks.gather(None)
    model, tok = made.pop() if made else start()
    reference = copy.deepcopy(model) if config.rl.kl_coef > 0 else None
    for policy in (model, reference):
        if policy is not None:
            policy.module.to(device)
        if policy is not None and dist.is_initialized():
            shard_policy(
                policy,
                compute_dtype=torch.bfloat16 if config.compute_dtype == "bfloat16" else None,
                checkpoint_activations=config.checkpoint_activations,
            )
    tasks = make_tasks("train")
    trainer = bugfix_trainer(
        model,
        tasks,
        tok,
        config.rl,
        make_curriculum(
            config.curriculum,
            tasks,
            config.rl,
            config.curriculum_settings,
            varied_sizes=config.curriculum_group_sizes,
        ),
        ranks=ranks,
        reference=reference if config.rl.kl_coef else None,
    )

    def evaluation(policy: Policy) -> dict[str, Any]:
        return evaluate(policy, heldout, tok, config.eval_samples, cfg=config.rl)

    if options.resume is None:
        ranks.first(lambda: run.create(config))
    stop = StopRequest()
    hooks = Hooks(on_phase=display.phase, on_step=display.step, should_stop=stop)
    try:
        with stop.listening():
            summary = train_run(run, config, trainer, evaluation, hooks)
    finally:
        display.close()
    if summary is None:
        console.print(
            f"stopped after step {trainer.num_steps} of {config.steps}; continue with:\n"
            f"  agentrl train --resume {run.path}",
            highlight=False,
            soft_wrap=True,
        )
        return 128 + (stop.signum or 0)
    console.print(summary_table(summary, run.path))
    return 0
