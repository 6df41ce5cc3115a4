"""`agentrl report`: a run's figures as one page."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from typing_extensions import Doc

from agentrl.plan.configs import find_model
from agentrl.plan.gpus import find_gpu
from agentrl.plan.memory import LOGITS, training_memory
from agentrl.plan.workload import Training
from agentrl.report.figures import Part, stacked_bars
from agentrl.report.html import Section, render_page
from agentrl.report.learning import MOST_RUNS, filter_section, learning_section, tasks_section
from agentrl.report.run import Run, load_run
from agentrl.report.savings import batch_section, savings_section, spent_section

_GB = 1e9
_MEMORY = (
    Part("parameters", "c1"),
    Part("gathered", "c2"),
    Part("gradients", "c3"),
    Part("optimizer", "c4"),
    Part("reference", "c7"),
    Part("activations", "c5"),
    Part("logits", "c6"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a run's figures as one self-contained page: what it learned, what it spent, what it saved."""

    run_dir: Annotated[
        Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR"), Doc("directory of a run of `agentrl train`")
    ]
    against: Annotated[tuple[Path, ...], Doc("directories of other runs to draw beside it")] = ()
    html: Annotated[Path | None, Doc("the page; unset: report.html in the run's directory")] = None
    watch: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], Doc("write the page anew until the run ends, Ctrl-C or SIGTERM")
    ] = False
    seconds: Annotated[float, Doc("between two pages of --watch")] = 5.0
    model: Annotated[str, Doc("the model whose training memory is drawn")] = "Qwen/Qwen3-8B"
    gpu: Annotated[str, Doc("the GPU of that training")] = "H200"
    gpus: Annotated[int, Doc("how many of them")] = 8


def main(args: list[str]) -> int:
    """Run the command; returns the exit status. Raises ValueError, in one line, for what is not a run."""
    options = tyro.cli(Options, args=args, prog="agentrl report")
    if not options.seconds > 0:
        raise ValueError(f"--seconds must be positive, got {options.seconds}")
    if len(options.against) >= MOST_RUNS:
        raise ValueError(f"--against takes at most {MOST_RUNS - 1} runs, got {len(options.against)}")
    path = options.html or options.run_dir / "report.html"
    if options.watch:
        _watch(options, path)
    else:
        write_page(options, path)
        print(f"wrote {path}")
    return 0


def _watch(options: Options, path: Path) -> None:
    """Write the page until the run has ended, or Ctrl-C or SIGTERM ends the watching."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        finished = write_page(options, path, options.seconds)
        print(f"open {path}; it follows the run until that ends, or until Ctrl-C", flush=True)
        while not finished:
            time.sleep(options.seconds)
            finished = write_page(options, path, options.seconds)
        print("the run has finished")
    except KeyboardInterrupt:
        print("stopped watching; the run goes on")
    finally:
        signal.signal(signal.SIGTERM, before)
    write_page(options, path)  # nothing renews it from here on, so it must not ask for more
    print(f"wrote {path}")


def write_page(options: Options, path: Path, refresh_seconds: float | None = None) -> bool:
    """Write the page, whole at any moment; returns whether the run has ended."""
    run, *others = [load_run(folder) for folder in (options.run_dir, *options.against)]
    refresh = None if run.finished else refresh_seconds
    text = render_page(f"Run {run.name}", sections(run, others, options), _lead(run), refresh)
    aside = path.with_name(f".{path.name}.aside")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
    return run.finished


def sections(run: Run, others: Sequence[Run], options: Options) -> list[Section]:
    """Everything on the page, in order; what a run did not record is left out."""
    found = [
        learning_section(run),
        filter_section([run, *others]),
        spent_section(run),
        savings_section(run),
        batch_section(run),
        _memory_section(run, options),
        tasks_section(run),
    ]
    return [section for section in found if section is not None]


def _lead(run: Run) -> str:
    total, done = run.config.get("steps", len(run.records)), len(run.records)
    episodes = sum(record.episodes for record in run.records)
    state = "finished" if run.finished else "not finished"
    text = f"{done:,} of {total:,} steps, {episodes:,} episodes, {state}"
    if points := run.heldout():
        text += f"; held-out pass rate {points[0][2]:.2f}"
        text += f" before, {points[-1][2]:.2f} " + ("after" if run.finished else "at last")
    return text


def _memory_section(run: Run, options: Options) -> Section:
    shape, gpu, training = find_model(options.model), find_gpu(options.gpu), Training()
    tokens = sum(record.tokens for record in run.records if record.sampled_actions is not None)
    actions = sum(record.sampled_actions or 0 for record in run.records)
    share, origin = (actions / tokens, "this run's") if tokens else (0.25, "an assumed")
    bars = [
        (
            f"logits {how}",
            [
                size / _GB
                for _, size in training_memory(
                    shape, options.gpus, replace(training, logits=how), share
                ).items()
            ],
        )
        for how in LOGITS
    ]
    figure = stacked_bars(
        f"Memory of a GPU that trains {shape.name}, {training.microbatch_tokens:,} tokens a microbatch",
        _MEMORY,
        bars,
        unit="GB",
        limit=("what training may fill", gpu.memory_bytes * training.train_memory_share / _GB),
        caption=f"{options.gpus} x {gpu.name}, activations recomputed, with {origin} share of action tokens, "
        f"{share:.0%}. Chunked: plain backward keeps every chunk; recomputed: one chunk at a time in both "
        "directions; actions: at the sampled tokens only. `agentrl plan` has the rest.",
    )
    return Section(heading="The same training on a large model", figures=(figure,))
