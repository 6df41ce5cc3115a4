"""The directory of a run: its files, their checks, and the lock that keeps others out."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from agentrl.train.checkpoint import Checkpoint, checkpoints_by_step, load_checkpoint, write_atomically
from agentrl.train.config import RunConfig, config_hash, config_to_toml, load_config
from agentrl.train.metrics import MetricsLog


class _Evaluated(msgspec.Struct):
    pass_rate: float


class _Started(msgspec.Struct):
    """What a run's end needs of its summary.json."""

    before: _Evaluated
    seconds_before: float


class _Finished(_Started):
    """What the closing table needs of it."""

    after: _Evaluated
    steps: int
    updates: int
    episodes: int
    errored_episodes: int
    truncated_episodes: int
    tokens: int
    zero_adv_frac: float
    pass_rate_before: float
    pass_rate_after: float
    seconds_sampling: float
    seconds_training: float
    seconds_evaluating: float


class _Counted(msgspec.Struct):
    """What `summarize` needs of a record of metrics.jsonl."""

    episodes: int
    errored_episodes: int
    truncated_episodes: int
    tokens: int
    updated: bool
    zero_adv_frac: float
    seconds_sampling: float
    seconds_training: float
    seconds_evaluating: float = 0.0


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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else trains in the directory while the block runs; ValueError where somebody does already.

        The lock goes with its process, however that ends. A file system without locks gives none.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"{self.path} is in use: another process trains in it; let it finish, or stop it first"
                ) from error
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(descriptor)

    def load_summary(self) -> dict[str, Any]:
        """The summary so far; empty before the first evaluation. Raises ValueError where it is damaged."""
        if not self.summary_path.exists():
            return {}
        try:
            summary = json.loads(self.summary_path.read_bytes())
            is_finished = isinstance(summary, dict) and "after" in summary
            msgspec.convert(summary, _Finished if is_finished else _Started)
        except (ValueError, RecursionError) as error:  # the latter: brackets without end
            raise ValueError(f"{self.summary_path} is damaged: {error}") from error
        return summary

    def load_records(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl. Raises ValueError where it is not one of a run."""
        records = self.metrics.read()
        for number, record in enumerate(records, start=1):
            try:
                msgspec.convert(record, _Counted)
            except msgspec.ValidationError as error:
                raise ValueError(f"{self.metrics.path} is damaged: line {number}: {error}") from error
        return records

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
        if self.checkpoints.exists() and not self.checkpoints.is_dir():
            raise ValueError(f"{self.path} is damaged: checkpoints is not a directory")
        by_step = checkpoints_by_step(self.checkpoints)
        records, summary = self.load_records(), self.load_summary()
        self._check_model()
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
        steps = [record["step"] for record in records]
        if len(steps) < checkpoint.step or steps != list(range(1, len(steps) + 1)):
            raise ValueError(f"{self.metrics.path} is damaged: it does not hold steps 1 to {checkpoint.step}")
        if not summary:
            raise ValueError(
                f"{self.path} is damaged: summary.json, written before any checkpoint, is missing"
            )
        return checkpoint

    def _check_model(self) -> None:
        """Raises ValueError where there is a final model that was cut short; its weights are not read."""
        try:
            if self.model_path.exists():
                with safe_open(self.model_path, "pt"):
                    pass
        except SafetensorError as error:
            raise ValueError(
                f"{self.model_path} is damaged: {error}. Move it away to have it written again"
            ) from error
