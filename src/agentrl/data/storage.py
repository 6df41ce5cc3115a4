"""Trajectories on disk, one a record: JSON Lines (also gzip, zstandard) and Parquet, streamed, lossless."""

# n tokens of one trajectory

import gzip
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

from agentrl.data.records import (
    BadRecord,
    RecordError,
    convert_record,
    decode_json,
    is_pipe,
    iter_raw_records,
    read_each,
    zstandard,
)
from agentrl.data.trajectory import Trajectory

FORMAT_VERSION = 1
_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_ROW_GROUP_TOKENS = 2**20
_INT64_MAX = 2**63 - 1


class StoredTrajectory(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One record of the own format, version 1. `agentrl` is the version and marks the format."""

    agentrl: int
    ids: list[int]  # [n]
    action_mask: list[int]  # [n-1] 0 or 1
    sample_logp: list[float] | None  # [n-1] nats; None: not recorded
    reward: float
    group: str
    episode: str
    info: dict[str, Any]


_DECODER = msgspec.json.Decoder(StoredTrajectory)


def save_trajectories(path: str | Path, trajs: Iterable[Trajectory]) -> int:
    """Number of trajectories written to `path`, in the format that its suffix names.

    The suffixes are .jsonl, .jsonl.gz, .jsonl.zst and .parquet. `trajs` may be a generator: one trajectory is
    held at a time (Parquet: about a million tokens). Every field comes back exactly as it was, so a value of
    `info` that JSON would change (a tuple, a tensor, NaN, a key that is no string) is a ValueError, as is an
    infinite log-prob. The file appears under its name only once it is whole.

    >>> import tempfile, torch
    >>> t = Trajectory(torch.tensor([5, 7]), torch.tensor([1.0]), torch.tensor([-0.5]), 1.0, {"task": "abs"})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     n = save_trajectories(f"{folder}/run.jsonl.gz", [t, t])
    ...     back = load_trajectories(f"{folder}/run.jsonl.gz")
    >>> n, back[1].ids.tolist(), back[1].info == t.info and back[1].episode == t.episode
    (2, [5, 7], True)
    """
    path = Path(path)
    if not path.name.endswith(_SUFFIXES):
        raise ValueError(
            f"{path}: the format is taken from the name; end it with one of {', '.join(_SUFFIXES)}"
        )
    partial = path.with_name(f".{path.name}.partial")
    try:
        with _opened_for_writing(path, partial) as file:
            write = _write_parquet if path.suffix == ".parquet" else _write_lines
            num_written = write(file, map(_to_record, range(_INT64_MAX), trajs))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return num_written


def iter_trajectories(
    path: str | Path, *, vocab_size: int | None = None, skipped: list[BadRecord] | None = None
) -> Iterator[Trajectory]:
    """The trajectories of a file that `save_trajectories` wrote, one at a time; the content tells the format.

    ValueError (one line: file, record, field) at the first bad record; with a list as `skipped`, bad records
    are added to it and the rest is read. With `vocab_size`, an id that is not below it is bad.
    """

    def read_row(row: dict[str, Any]) -> Trajectory:
        return trajectory_from_record(decode_row(row), vocab_size)

    def read_line(raw: bytes | None) -> Trajectory:
        try:
            stored = _DECODER.decode(raw or b"")
        except (msgspec.DecodeError, RecursionError):  # the slow way names what is wrong
            return trajectory_from_record(decode_json(raw), vocab_size)
        return _from_stored(stored, vocab_size)

    if is_parquet(path):
        yield from read_each(path, iter_parquet_rows(path), read_row, skipped)
    else:
        yield from read_each(path, iter_raw_records(path), read_line, skipped)


def load_trajectories(
    path: str | Path, *, vocab_size: int | None = None, skipped: list[BadRecord] | None = None
) -> list[Trajectory]:
    """All trajectories of a file that `save_trajectories` wrote, in its order.

    Raises ValueError (one line: file, record, field) at the first bad record; with a list as `skipped`, bad
    records are added to it and the rest is read. With `vocab_size`, an id that is not below it is bad.
    """
    return list(iter_trajectories(path, vocab_size=vocab_size, skipped=skipped))


def trajectory_from_record(value: Any, vocab_size: int | None = None) -> Trajectory:
    """The trajectory that a decoded JSON record of the own format holds; RecordError names a bad field."""
    if not isinstance(value, dict) or "agentrl" not in value:
        raise RecordError(
            "agentrl", "missing, so this is not agentrl's format; import_trajectories reads others"
        )
    return _from_stored(convert_record(value, StoredTrajectory), vocab_size)


def _from_stored(stored: StoredTrajectory, vocab_size: int | None) -> Trajectory:
    if stored.agentrl != FORMAT_VERSION:
        raise RecordError("agentrl", f"format version {stored.agentrl}; this agentrl reads {FORMAT_VERSION}")
    return build_trajectory(
        stored.ids,
        stored.action_mask,
        stored.sample_logp,
        reward=stored.reward,
        info=stored.info,
        group=stored.group,
        episode=stored.episode,
        vocab_size=vocab_size,
    )


def build_trajectory(
    ids: list[int],
    action_mask: list[int],
    sample_logp: list[float] | None,
    *,
    reward: float,
    info: dict[str, Any],
    group: str = "",
    episode: str = "",
    vocab_size: int | None = None,
) -> Trajectory:
    """The trajectory in plain lists, every value checked; RecordError names the first field that is wrong."""
    n = len(ids)
    if n == 0:
        raise RecordError("ids", "empty")
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest > _INT64_MAX:
        raise RecordError("ids", f"out of range: {lowest if lowest < 0 else highest}")
    if vocab_size is not None and highest >= vocab_size:
        raise RecordError("ids", f"out of range: {highest}, the vocabulary has {vocab_size}")
    for field, values in (("action_mask", action_mask), ("sample_logp", sample_logp)):
        if values is not None and len(values) != n - 1:
            raise RecordError(field, f"{len(values)} entries, wanted {n - 1}, one fewer than ids has")
    if not set(action_mask) <= {0, 1}:
        raise RecordError(
            "action_mask", f"must hold only 0 and 1, got {sorted(set(action_mask) - {0, 1})[0]}"
        )
    try:
        reward = float(reward)
    except OverflowError:
        raise RecordError("reward", "must be finite, got a whole number too large for a float") from None
    if not math.isfinite(reward):
        raise RecordError("reward", f"must be finite, got {reward}")
    mask = torch.tensor(action_mask, dtype=torch.float32)
    logp = torch.full((n - 1,), math.nan)
    if sample_logp is not None:
        logp = torch.tensor(sample_logp, dtype=torch.float64).to(torch.float32)
        if not bool(logp.isfinite().all()):
            at = int((~logp.isfinite()).nonzero()[0])
            raise RecordError(
                f"sample_logp[{at}]", "not finite; where none was recorded write null for the vector"
            )
    try:
        return Trajectory(torch.tensor(ids), mask, logp, reward, info, group, episode)
    except ValueError as error:
        raise RecordError("", str(error)) from None


def is_parquet(path: str | Path) -> bool:
    """Whether the file's first bytes are Parquet's; not of a pipe, which is left unread."""
    if is_pipe(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def pyarrow_parquet() -> Any:
    """The module pyarrow.parquet; ValueError naming the extra where it is not installed."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ValueError("Parquet needs pyarrow: pip install 'agentrl[parquet]', or use .jsonl.zst") from None
    return pyarrow.parquet


def iter_parquet_rows(
    path: str | Path, rows_at_once: int = 64, progress: Callable[[float], None] | None = None
) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """('row 3', columns) of each row of a Parquet file, a few rows held at a time; ValueError if damaged."""
    parquet = pyarrow_parquet()
    import pyarrow

    number = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=rows_at_once):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
                if progress is not None:
                    progress(number / max(1, file.metadata.num_rows))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: damaged after {number} rows: {str(error).splitlines()[0]}") from None
    if number == 0:
        raise ValueError(f"{path}: no rows in it; is it empty because the run that wrote it failed?")


def decode_row(row: dict[str, Any]) -> dict[str, Any]:
    """A record in which `info` is decoded, as it is where the record comes from Parquet."""
    info = row.get("info")
    return {**row, "info": decode_json(info.encode())} if isinstance(info, str) else row


def _to_record(i: int, traj: Trajectory) -> StoredTrajectory:
    logp = traj.sample_logp
    unknown = bool(logp.isnan().any())
    if bool(logp.isinf().any()):
        raise ValueError(f"trajectory {i}: sample_logp is infinite at {int(logp.isinf().nonzero()[0])}")
    _check_round_trip(i, traj.info)
    return StoredTrajectory(
        agentrl=FORMAT_VERSION,
        ids=traj.ids.tolist(),
        action_mask=traj.action_mask.to(torch.int64).tolist(),
        sample_logp=None if unknown else logp.tolist(),
        reward=float(traj.reward),
        group=traj.group,
        episode=traj.episode,
        info=traj.info,
    )


def _check_round_trip(i: int, info: dict[str, Any]) -> None:
    for key, value in info.items():
        try:
            same = isinstance(key, str) and _same(msgspec.json.decode(msgspec.json.encode(value)), value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            same = False
        if not same:
            raise ValueError(
                f"trajectory {i}: info[{key!r}] is a {type(value).__name__} that JSON would not give back; "
                "use str, int, float, bool, None, and lists and dicts (with str keys) of these"
            )


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


@contextmanager
def _opened_for_writing(path: Path, partial: Path) -> Iterator[BinaryIO]:
    if path.suffix == ".gz":  # mtime=0: the same trajectories give the same bytes
        with open(partial, "wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as file:
            yield file  # pyright: ignore[reportReturnType]
    elif path.suffix == ".zst":
        with open(partial, "wb") as raw, zstandard(path).ZstdCompressor().stream_writer(raw) as file:
            yield file
    else:
        with open(partial, "wb") as file:
            yield file


def _write_lines(file: BinaryIO, records: Iterator[StoredTrajectory]) -> int:
    encoder = msgspec.json.Encoder()
    num_written = 0
    for num_written, record in enumerate(records, 1):  # noqa: B007
        file.write(encoder.encode(record))
        file.write(b"\n")
    return num_written


def _write_parquet(file: BinaryIO, records: Iterator[StoredTrajectory]) -> int:
    parquet = pyarrow_parquet()
    import pyarrow as pa

    schema = pa.schema(
        [
            ("agentrl", pa.int32()),
            ("ids", pa.list_(pa.int64())),
            ("action_mask", pa.list_(pa.int8())),
            ("sample_logp", pa.list_(pa.float32())),
            ("reward", pa.float64()),
            ("group", pa.string()),
            ("episode", pa.string()),
            ("info", pa.string()),  # JSON: its keys differ from record to record
        ]
    )
    num_written = 0
    with parquet.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
        rows: list[dict[str, Any]] = []
        num_tokens = 0
        for record in records:
            row = msgspec.structs.asdict(record)
            row["info"] = msgspec.json.encode(record.info).decode()
            rows.append(row)
            num_tokens += len(record.ids)
            num_written += 1
            if num_tokens >= _ROW_GROUP_TOKENS:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                rows, num_tokens = [], 0
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return num_written
