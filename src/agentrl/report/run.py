"""A run as its directory tells it: what was set, a record a step, the evaluations, and one batch."""

import tomllib
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agentrl.report.picture import PictureRow

T = TypeVar("T")


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics.jsonl; what a run did not record is None."""

    step: int
    pass_rate: float | None = None
    heldout_pass_rate: float | None = None
    zero_adv_frac: float | None = None
    pool: float | None = None  # tasks that the step could draw from
    episodes: int = 0
    tokens: int = 0
    entropy: float | None = None
    clip_frac: float | None = None
    grad_norm: float | None = None
    action_tokens: float = 0  # that the step learned from
    sampled_actions: int | None = None
    positions_sampled_padded: int | None = None
    positions_padded: int | None = None
    positions_packed: int | None = None
    positions_tree: int | None = None
    actions_tree: int | None = None
    positions_decoded: int | None = None
    positions_uncached: int | None = None
    seconds_sampling: float = 0.0
    seconds_training: float = 0.0
    seconds_evaluating: float = 0.0


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation on the held-out tasks."""

    pass_rate: float
    per_task: dict[str, float] = {}


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json: `after` is None until the run has ended."""

    before: Evaluation | None = None
    after: Evaluation | None = None
    seconds_before: float = 0.0
    seconds_after: float = 0.0


class BatchRow(msgspec.Struct, frozen=True):
    """A row of batch.json."""

    runs: tuple[tuple[str, int], ...]
    borders: tuple[int, ...] = ()

    def picture(self) -> PictureRow:
        """The row as a figure takes it."""
        return PictureRow(self.runs, self.borders)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """batch.json: how the trajectories of one step stand in rows, by layout."""

    step: int
    num_trajectories: int
    num_shown: int
    row_tokens: int
    vocab_size: int
    layouts: dict[str, tuple[BatchRow, ...]]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All that a report draws of a run."""

    path: Path
    config: dict[str, Any]  # config.toml
    records: tuple[StepRecord, ...]
    summary: Summary
    batch: Batch | None = None

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.resolve().name

    @property
    def finished(self) -> bool:
        """Whether the last evaluation is there."""
        return self.summary.after is not None

    def setting(self, name: str, default: Any) -> Any:
        """A setting of [rl], or `default` where the run has none of that name."""
        return self.config.get("rl", {}).get(name, default)

    def episodes_until(self) -> list[int]:
        """Episodes sampled until the end of each step."""
        return list(accumulate(record.episodes for record in self.records))

    def heldout(self) -> list[tuple[int, int, float]]:
        """(step, episodes until then, pass rate) of every evaluation on the held-out tasks."""
        points: list[tuple[int, int, float]] = []
        if self.summary.before is not None:
            points.append((0, 0, self.summary.before.pass_rate))
        episodes = self.episodes_until()
        for record, count in zip(self.records, episodes, strict=True):
            if record.heldout_pass_rate is not None:
                points.append((record.step, count, record.heldout_pass_rate))
        if self.summary.after is not None and self.records:
            points.append((self.records[-1].step, episodes[-1], self.summary.after.pass_rate))
        return points


def load_run(path: Path) -> Run:
    """Read a run's directory, whether it goes on or has ended; a line that is being written is left out.

    Raises ValueError, naming the file, where the directory is not one of a run or a file is damaged.
    """
    config_path = path / "config.toml"
    if not config_path.is_file():
        raise ValueError(f"{path} is not the directory of a run: it holds no config.toml")
    try:
        config = tomllib.loads(config_path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{config_path} is not TOML: {error}") from error
    summary_path, batch_path = path / "summary.json", path / "batch.json"
    summary, batch = Summary(), None
    if summary_path.exists():
        summary = _decoded(msgspec.json.Decoder(Summary).decode, summary_path.read_bytes(), str(summary_path))
        if summary.before is None:
            raise ValueError(f"{summary_path} is damaged: it holds no evaluation `before`")
    if batch_path.exists():
        batch = _decoded(msgspec.json.Decoder(Batch).decode, batch_path.read_bytes(), str(batch_path))
    return Run(
        path=path, config=config, records=_records(path / "metrics.jsonl"), summary=summary, batch=batch
    )


def _records(path: Path) -> tuple[StepRecord, ...]:
    if not path.exists():
        return ()
    decode = msgspec.json.Decoder(StepRecord).decode
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is not whole yet
    return tuple(_decoded(decode, line, f"{path}, line {i}") for i, line in enumerate(lines, start=1))


def _decoded(decode: Callable[[bytes], T], content: bytes, where: str) -> T:
    try:
        return decode(content)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{where} is damaged: {error}") from error
