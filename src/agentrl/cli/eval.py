"""`agentrl eval`: how well the model of a run plays."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Options:
    """Play tasks with the model of a run, without learning, and show its pass rate on each."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Directory of a run of `agentrl train`."""
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Evaluate the checkpoint of this step. Default: the final model, else the newest checkpoint."""
    split: Literal["heldout", "train", "all"] = "heldout"
    """Which tasks to play."""
    samples: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Episodes a task. Default: the run's eval_samples."""
    temperature: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Sampling temperature. Default: the run's."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Seed of the episodes. Default: the run's, which repeats the run's own evaluation."""
    device: Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")] = None
    """Where the model computes. Default: where the run did."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the figures as one JSON record instead of a table."""


def main(args: list[str]) -> int:
    """Run the command."""
    options = tyro.cli(Options, prog="agentrl eval", args=args)

    import json

    import torch

    from agentrl.gym.tasks import make_tasks
    from agentrl.train.config import check_samples
    from agentrl.train.directory import RunDirectory
    from agentrl.train.distributed import own_device
    from agentrl.train.evaluate import evaluate
    from agentrl.train.run import load_policy
    from agentrl.train.start import load_tokenizer, resolve_model

    run = RunDirectory(options.run_dir)
    config = run.load_config()
    resolve_model(config.model)
    cfg = config.rl
    if options.temperature is not None:
        cfg = replace(cfg, temperature=options.temperature)
    if options.seed is not None:
        cfg = replace(cfg, seed=options.seed)
    if options.samples is not None:
        check_samples("--samples", options.samples)
    device = own_device(config.device if options.device is None else options.device)
    torch.set_num_threads(config.threads)
    model, step = load_policy(run, options.step)
    model.module.to(device)
    tok = load_tokenizer(config)
    samples = config.eval_samples if options.samples is None else options.samples
    figures = evaluate(model, make_tasks(options.split), tok, samples, cfg=cfg)
    if options.json:
        print(json.dumps({"step": step, "split": options.split, "samples": samples, **figures}))
        return 0
    console = Console()
    which = "final model" if step is None else f"checkpoint of step {step}"
    console.print(f"{run.path}, {which}: {samples} episodes a task", highlight=False, soft_wrap=True)
    table = Table("task", "pass rate")
    table.columns[1].justify = "right"
    for name, rate in figures["per_task"].items():
        table.add_row(name, f"{rate:.2f}")
    table.add_section()
    table.add_row(f"all {options.split} tasks", f"{figures['pass_rate']:.2f}")
    console.print(table)
    return 0
