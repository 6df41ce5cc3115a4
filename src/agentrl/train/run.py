"""A run and its directory: start, stop, continue and finish, with the same result however often it stops."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from agentrl.models.policy import Policy
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.train.checkpoint import (
    Checkpoint,
    checkpoints_by_step,
    deserialize,
    load_checkpoint,
    read_shards,
    save_checkpoint,
    serialize,
    write_atomically,
)
from agentrl.train.config import RunConfig, config_hash, config_to_toml, load_config
from agentrl.train.distributed import gathered
from agentrl.train.loop import Trainer
from agentrl.train.metrics import MetricsLog
from agentrl.train.recording import batch_picture
from agentrl.train.start import load_start, load_tokenizer

# Held-out evaluation: a dictionary with at least `pass_rate`, of plain JSON values.
Evaluation = Callable[[Policy], dict[str, Any]]


class RunDirectory:
    """The files of a run.

    config.toml | metrics.jsonl: a record a step | batch.json: how one step's trajectories stand in rows |
    checkpoints/ | and at the end model.safetensors;
    summary.json holds the evaluation `before` from the start, and everything else at the end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.toml"
        self.metrics = MetricsLog(path / "metrics.jsonl")
        self.checkpoints = path / "checkpoints"
        self.model_path = path / "model.safetensors"
        self.summary_path = path / "summary.json"
        self.batch_path = path / "batch.json"

    def check_free(self) -> None:
        """Raises ValueError where the directory holds anything already; creates nothing."""
        if self.config_path.exists():
            raise ValueError(f"{self.path} already holds a run; continue it with --resume {self.path}")
        if self.path.exists() and (not self.path.is_dir() or any(self.path.glob("[!.]*"))):
            raise ValueError(f"{self.path} exists and is not an empty directory; choose another --run-dir")

    def create(self, config: RunConfig) -> None:
        """Start the directory with its configuration. Raises ValueError where it is not free."""
        self.check_free()
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(config)

    def write_config(self, config: RunConfig) -> None:
        """Write config.toml anew, if it says something else."""
        text = config_to_toml(config)
        if not self.config_path.exists() or self.config_path.read_text(encoding="utf-8") != text:
            write_atomically(self.config_path, text.encode())

    def load_config(self) -> RunConfig:
        """The run's configuration. Raises ValueError where the directory is not one of a run."""
        if not self.config_path.is_file():
            raise ValueError(
                f"{self.path} is not the directory of a run: it holds no config.toml "
                "(a run that was stopped in its first moment leaves none; start it again)"
            )
        return load_config(self.config_path)

    def load_summary(self) -> dict[str, Any]:
        """The summary so far; empty before the first evaluation. Raises ValueError where it is damaged."""
        if not self.summary_path.exists():
            return {}
        try:
            summary = json.loads(self.summary_path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{self.summary_path} is damaged: {error}") from error
        if not isinstance(summary, dict) or "before" not in summary:
            raise ValueError(f"{self.summary_path} is damaged: it holds no evaluation `before`")
        return summary

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        write_atomically(self.summary_path, (json.dumps(summary, indent=2) + "\n").encode())

    def write_batch(self, picture: dict[str, Any]) -> None:
        """Write batch.json."""
        write_atomically(self.batch_path, (json.dumps(picture) + "\n").encode())

    def load_latest(self, config: RunConfig) -> Checkpoint | None:
        """The newest checkpoint, verified together with the files that must fit it; None before the first.

        Raises ValueError, naming what is wrong, for a damaged or foreign directory. Changes nothing.
        """
        by_step = checkpoints_by_step(self.checkpoints)
        records, summary = self.metrics.read(), self.load_summary()
        if not by_step:
            if records:
                raise ValueError(
                    f"{self.path} is damaged: metrics.jsonl holds {len(records)} steps, checkpoints/ nothing"
                )
            return None
        path = by_step[max(by_step)]
        checkpoint = load_checkpoint(path)
        if checkpoint.config_hash != config_hash(config.rl):
            raise ValueError(
                f"{path} was made with other settings of [rl] than config.toml and flags give now; "
                "they cannot change within a run, so start a new one"
            )
        if [record["step"] for record in records][: checkpoint.step] != list(range(1, checkpoint.step + 1)):
            raise ValueError(f"{self.metrics.path} is damaged: it does not hold steps 1 to {checkpoint.step}")
        if not summary:
            raise ValueError(
                f"{self.path} is damaged: summary.json, written before any checkpoint, is missing"
            )
        return checkpoint


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the caller of `train_run` sees and decides while it runs."""

    on_phase: Callable[[str], None] = lambda phase: None  # 'evaluating', 'training'
    on_step: Callable[[dict[str, Any]], None] = lambda record: None  # each step's record, as in metrics.jsonl
    should_stop: Callable[[], bool] = lambda: False  # asked after each step
    clock: Callable[[], float] = time.perf_counter  # seconds


def train_run(
    run: RunDirectory, config: RunConfig, trainer: Trainer, evaluation: Evaluation, hooks: Hooks
) -> dict[str, Any] | None:
    """Carry a run from wherever its directory is to its end; returns its summary, or None if asked to stop.

    The directory must exist (`RunDirectory.create`), the trainer be new, with the model that the run starts
    from. Stopped at any moment, in any way, and called again, it ends with the same weights and records as
    one that was never stopped: what a step depends on is in the checkpoint, records after it are dropped.
    With several ranks, all call it; the first one evaluates and writes the files, any can ask to stop.
    Raises ValueError, before anything changes, for a directory that is damaged or does not fit `config`.
    """
    ranks = trainer.ranks
    checkpoint, summary = run.load_latest(config), run.load_summary()
    ranks.gather(None)  # all have read before the first one writes
    if checkpoint is not None:
        trainer.restore(checkpoint)
        if "after" in summary and checkpoint.step >= config.steps:
            return summary
    if ranks.is_first:
        run.metrics.truncate(trainer.num_steps)
        run.write_config(config)

    def evaluate() -> tuple[dict[str, Any], float]:
        hooks.on_phase("evaluating")
        start = hooks.clock()
        with gathered(trainer.model):
            result = ranks.first(lambda: evaluation(trainer.model))
        return result, hooks.clock() - start

    def save() -> None:
        save_checkpoint(run.checkpoints, trainer.checkpoint(), config.keep_checkpoints, ranks)

    if checkpoint is None:
        before, seconds = evaluate()
        if ranks.is_first:
            run.write_summary({"before": before, "seconds_before": seconds})
        save()
    hooks.on_phase("training")
    while trainer.num_steps < config.steps:
        if any(ranks.gather(hooks.should_stop())):
            save()
            return None
        record = trainer.step()
        is_due = config.eval_every > 0 and trainer.num_steps % config.eval_every == 0
        if is_due and trainer.num_steps < config.steps:  # the end has an evaluation of its own
            heldout, seconds = evaluate()
            hooks.on_phase("training")
            record |= {"heldout_pass_rate": heldout["pass_rate"], "seconds_evaluating": seconds}
        if ranks.is_first:
            run.metrics.append(record)
        if (
            ranks.is_first
            and trainer.learned_from
            and (trainer.num_steps % config.checkpoint_every == 0 or not run.batch_path.exists())
        ):
            vocab_size = trainer.model.head().weight.shape[0]
            run.write_batch(
                batch_picture(trainer.learned_from, trainer.num_steps, config.rl.max_tokens, vocab_size)
            )
        hooks.on_step(record)
        if trainer.num_steps % config.checkpoint_every == 0 or trainer.num_steps == config.steps:
            save()
    content = model_bytes(trainer.model, trainer.checkpoint().model_config)
    if ranks.is_first:
        write_atomically(run.model_path, content)
    after, seconds = evaluate()

    def finish() -> dict[str, Any]:
        first = {name: run.load_summary()[name] for name in ("before", "seconds_before")}
        summary = summarize(run, {**first, "after": after, "seconds_after": seconds})
        run.write_summary(summary)
        return summary

    return ranks.first(finish)


def summarize(run: RunDirectory, evaluations: dict[str, Any]) -> dict[str, Any]:
    """The figures of a finished run: both evaluations, what it took, and the seconds of each phase."""
    records = run.metrics.read()

    def total(name: str) -> float:
        return sum(record[name] for record in records)

    before, after = evaluations["before"], evaluations["after"]
    return {
        "steps": len(records),
        "episodes": total("episodes"),
        "errored_episodes": total("errored_episodes"),
        "truncated_episodes": total("truncated_episodes"),
        # Share of all episodes that gave no gradient.
        "zero_adv_frac": sum(r["zero_adv_frac"] * r["episodes"] for r in records) / max(total("episodes"), 1),
        "tokens": total("tokens"),
        "updates": total("updated"),
        "pass_rate_before": before["pass_rate"],
        "pass_rate_after": after["pass_rate"],
        "seconds_sampling": total("seconds_sampling"),
        "seconds_training": total("seconds_training"),
        "seconds_evaluating": evaluations["seconds_before"]
        + sum(record.get("seconds_evaluating", 0.0) for record in records)
        + evaluations["seconds_after"],
        **evaluations,
    }


def model_bytes(model: Policy, model_config: dict[str, Any]) -> bytes:
    """A model's weights and what builds it anew, as a safetensors file; all ranks must call it."""
    tensors = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.module.state_dict().items()
    }
    return serialize(tensors, {"model_config": model_config})


def load_policy(run: RunDirectory, step: int | None = None) -> tuple[Policy, int | None]:
    """(policy, step) of a run: its final model, else its newest checkpoint, else that of `step`.

    The step is None for the final model. A Hugging Face model is built from where the run started, which
    config.toml names, and given the run's weights. Raises ValueError where there is no such model or it is
    damaged.
    """
    config = run.load_config()
    if step is None and run.model_path.exists():
        try:
            tensors, meta = deserialize(run.model_path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{run.model_path} is damaged: {error}") from error
        return _with_weights(_empty(config, meta["model_config"]), tensors, run.model_path), None
    by_step = checkpoints_by_step(run.checkpoints)
    if not by_step:
        raise ValueError(f"{run.path} holds no model yet: its run was stopped before the first checkpoint")
    if step is None:
        step = max(by_step)
    if step not in by_step:
        raise ValueError(f"{run.path} holds no checkpoint of step {step}; it has {sorted(by_step)}")
    checkpoint = load_checkpoint(by_step[step])
    policy, tensors = _empty(config, checkpoint.model_config), checkpoint.model
    if checkpoint.shards is not None:
        module = policy.module
        tensors, _ = read_shards(checkpoint.shards, module.state_dict(), list(module.parameters()))
    return _with_weights(policy, tensors, by_step[step]), step


def _empty(config: RunConfig, model_config: dict[str, Any]) -> Policy:
    """A policy of the run's shape, its weights still to come."""
    if config.model is not None:
        return load_start(config.model, load_tokenizer(config))
    try:
        return TinyAgent(TinyConfig(**model_config))
    except TypeError as error:
        raise ValueError(f"the run's model is not a TinyAgent: {error}") from error


def _with_weights(policy: Policy, tensors: dict[str, torch.Tensor], path: Path) -> Policy:
    try:
        policy.module.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{path} does not hold the run's model: {error}") from error
    return policy
