"""`agentrl analyze`: what training on a file of trajectories would waste, and what to do about it."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from typing_extensions import Doc

import agentrl
from agentrl.plan.configs import find_model
from agentrl.plan.engine import VLLM_0_30_0
from agentrl.plan.gpus import find_gpu
from agentrl.plan.hours import Plan
from agentrl.plan.workload import Generation, Training, Workload

if TYPE_CHECKING:
    from agentrl.data.records import BadRecord
    from agentrl.diagnose.analyze import Analysis

_SECONDS_BETWEEN_LINES = 10  # of progress, where it goes to a file


@dataclass(frozen=True, kw_only=True)
class Options:
    """What training on these trajectories would waste, and what to do about it."""

    files: tyro.conf.Positional[
        Annotated[tuple[Path, ...], Doc("trajectory files of any supported kind; their content tells which")]
    ]
    tokenizer: Annotated[
        str | None, Doc("a Hugging Face tokenizer for files that hold text; unset: the embedded one")
    ] = None
    model: Annotated[str | None, Doc("a well-known model or its config.json: projects the cost of a run")] = (
        None
    )
    gpu: Annotated[str | None, Doc("the GPU of that run; unset: H200")] = None
    gpus: Annotated[int | None, Doc("how many of them; unset: 8")] = None
    episodes: Annotated[int | None, Doc("episodes of an optimizer step of that run; unset: 512")] = None
    steps: Annotated[int | None, Doc("optimizer steps of that run; unset: 300")] = None
    max_tokens: Annotated[
        int | None, Doc("tokens of a row; unset: the power of two that holds the longest")
    ] = None
    microbatch: Annotated[int, Doc("sequences of a microbatch of fixed count")] = 8
    vocab_size: Annotated[int | None, Doc("size of the vocabulary; ids at or above it are bad records")] = (
        None
    )
    skip_bad: Annotated[bool, Doc("read past records that cannot be read; they are counted and listed")] = (
        False
    )
    allow_pickle: Annotated[bool, Doc("read pickles (slime dumps), which run whatever code they hold")] = (
        False
    )
    json: Annotated[bool, Doc("print JSON instead of tables")] = False
    html: Annotated[Path | None, Doc("write a self-contained page to this file too")] = None


def main(args: list[str]) -> int:
    """Run the command; returns the exit status. Raises ValueError, in one line, for input that cannot be."""
    options = tyro.cli(Options, args=args, prog="agentrl analyze")
    if not options.files:
        raise ValueError("name at least one trajectory file")
    for name in ("max_tokens", "microbatch", "vocab_size"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    plan = _plan(options)
    skipped: list[BadRecord] | None = [] if options.skip_bad else None
    analysis = _analyze(options, plan, skipped)
    if options.json:
        print(json.dumps(as_json(options, analysis, skipped or []), indent=1))
    else:
        print_tables(analysis)
    for bad in skipped or []:
        print(f"skipped {bad}", file=sys.stderr)
    if skipped is not None:
        print(
            f"skipped {len(skipped):,} records, read {analysis.num_trajectories:,} trajectories",
            file=sys.stderr,
        )
    if options.html is not None:
        from agentrl.cli.analyze_page import as_html

        names = [path.name for path in options.files]
        options.html.write_text(as_html(names, analysis, skipped or []), encoding="utf-8")
        print(f"wrote {options.html}", file=sys.stderr)
    return 0


def _plan(options: Options) -> Plan | None:
    if options.model is None:
        for name in ("gpu", "gpus", "episodes", "steps"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name} says what a run would cost; name its --model too")
        return None
    return Plan(
        shape=find_model(options.model),
        gpu=find_gpu(options.gpu or "H200"),
        gpus=8 if options.gpus is None else options.gpus,
        workload=Workload(
            episodes=512 if options.episodes is None else options.episodes,
            steps=300 if options.steps is None else options.steps,
        ),
        generation=Generation(),
        training=Training(),
        constants=VLLM_0_30_0,
    )


def _analyze(options: Options, plan: Plan | None, skipped: "list[BadRecord] | None") -> "Analysis":
    from agentrl.data.importers import import_trajectories
    from agentrl.diagnose.analyze import AnalyzeOptions, analyze

    vocab_size = options.vocab_size or (None if plan is None else plan.shape.vocab_size)
    against = AnalyzeOptions(
        max_tokens=options.max_tokens, microbatch=options.microbatch, vocab_size=vocab_size, plan=plan
    )
    with progress_bar() as (report, count):
        trajs = import_trajectories(
            options.files,
            tokenizer=options.tokenizer,
            vocab_size=options.vocab_size,
            allow_pickle=options.allow_pickle,
            skipped=skipped,
            progress=report,
        )
        return analyze(count(trajs), against)


@contextmanager
def progress_bar() -> Iterator[tuple[Callable[[float], None], Callable[[Iterator[Any]], Iterator[Any]]]]:
    """(report the share done, count what passes): a bar on a terminal, a line now and then elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    num_read, share, last = 0, 0.0, time.monotonic()
    columns = (TextColumn("reading"), BarColumn(), TextColumn("{task.fields[num_read]:,} trajectories"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("reading", total=1.0, num_read=0)

        def report(done: float) -> None:
            nonlocal share
            share = done

        def count(items: Iterator[Any]) -> Iterator[Any]:
            nonlocal num_read, last
            for item in items:
                num_read += 1
                yield item
                if num_read % 100 == 0 and console.is_terminal:
                    bar.update(task, completed=share, num_read=num_read)
                elif not console.is_terminal and time.monotonic() - last > _SECONDS_BETWEEN_LINES:
                    last = time.monotonic()
                    print(f"read {num_read:,} trajectories, {share:.0%} of the files", file=sys.stderr)

        yield report, count


def print_tables(analysis: "Analysis") -> None:
    """One table of all figures, a section at a time, on standard output."""
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    table = Table(box=None, pad_edge=False, expand=True)
    # a ratio alone would break the names' words on a narrow terminal
    narrow = console.width < 64
    table.add_column("", ratio=None if narrow else 26, width=14 if narrow else None, overflow="fold")
    for heading, ratio in (("measured", 40), ("what to do", 54)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for section, findings in analysis.sections.items():
        table.add_row(f"[bold]{section}[/bold]", "", "")
        for finding in findings:
            name, text, advice = map(escape, (finding.name, finding.text, finding.advice))
            table.add_row(Padding(name, (0, 0, 0, 2)), text, advice)
    console.print(table)


def as_json(options: Options, analysis: "Analysis", skipped: "list[BadRecord]") -> dict[str, Any]:
    """The analysis as plain values: every figure with its value, text and advice."""
    return {
        "agentrl": agentrl.__version__,
        "files": [str(path) for path in options.files],
        "num_trajectories": analysis.num_trajectories,
        "sections": {
            section: [
                {"name": f.name, "value": f.value, "text": f.text, "advice": f.advice} for f in findings
            ]
            for section, findings in analysis.sections.items()
        },
        "skipped": [str(bad) for bad in skipped],
    }
