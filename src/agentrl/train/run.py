"""A run and its directory: start, stop, continue and finish, with the same result however often it stops."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from agentrl.models.policy import Policy
from agentrl.models.tiny import TinyAgent, TinyConfig
from agentrl.train.checkpoint import (
    checkpoints_by_step,
    deserialize,
    load_checkpoint,
    read_shards,
    save_checkpoint,
    serialize,
    write_atomically,
)
from agentrl.train.config import RunConfig
from agentrl.train.directory import RunDirectory
from agentrl.train.distributed import gathered
from agentrl.train.loop import Trainer
from agentrl.train.recording import batch_picture
from agentrl.train.start import load_start, load_tokenizer

# Held-out evaluation: a dictionary with at least `pass_rate`, of plain JSON values.
Evaluation = Callable[[Policy], dict[str, Any]]


class _Shape(msgspec.Struct):
    """What a model's file says beside its weights."""

    model_config: dict[str, Any]


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
    Raises ValueError, before anything changes, for a directory that is damaged, does not fit `config`, or in
    which another process trains.
    """
    with run.locked() if trainer.ranks.is_first else nullcontext():
        return _carry_on(run, config, trainer, evaluation, hooks)


def _carry_on(
    run: RunDirectory, config: RunConfig, trainer: Trainer, evaluation: Evaluation, hooks: Hooks
) -> dict[str, Any] | None:
    ranks = trainer.ranks
    checkpoint, summary = run.load_latest(config), run.load_summary()
    has_ended = "after" in summary and run.model_path.exists()
    ranks.gather(None)  # all have read before the first one writes
    if checkpoint is not None:
        trainer.restore(checkpoint)
        if has_ended and checkpoint.step >= config.steps:
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
            shape = msgspec.convert(meta, _Shape)
        except ValueError as error:
            raise ValueError(f"{run.model_path} is damaged: {error}") from error
        return _with_weights(_empty(config, shape.model_config), tensors, run.model_path), None
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
