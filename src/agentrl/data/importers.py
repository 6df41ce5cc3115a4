"""Trajectories from the files of other trainers and benchmarks, told apart by content, read as a stream."""

from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from agentrl.data.chat import ChatTokenizer, load_tokenizer
from agentrl.data.formats import Format, Source
from agentrl.data.records import BadRecord, RecordError, decode_json, is_pipe, iter_raw_records, read_each
from agentrl.data.storage import decode_row, is_parquet, iter_parquet_rows, trajectory_from_record
from agentrl.data.text_formats import (
    read_atif,
    read_messages,
    read_swe_agent,
    read_tau,
    read_trl,
    read_verifiers_results,
    read_verl_dump,
    read_verl_parquet,
)
from agentrl.data.token_formats import read_nemo, read_prime, read_slime, read_verifiers_trace
from agentrl.data.trajectory import Trajectory


def _has(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda record: all(name in record for name in names)


def _read_own(value: dict[str, Any], source: Source) -> list[Trajectory]:
    return [trajectory_from_record(decode_row(value), source.vocab_size)]


# the first that matches is taken, so the more particular ones come first
FORMATS: tuple[Format, ...] = (
    Format("agentrl", _has("agentrl"), _read_own),
    Format("ATIF", lambda r: str(r.get("schema_version", "")).startswith("ATIF"), read_atif),
    Format("verifiers traces", _has("nodes", "rewards"), read_verifiers_trace),
    Format("tau-bench", _has("traj", "task_id"), read_tau),
    Format("SWE-agent", _has("history"), read_swe_agent),
    Format("prime-rl token export", _has("token_ids", "loss_mask"), read_prime),
    Format("NeMo-RL", _has("rewards", "input_lengths"), read_nemo),
    Format("slime", _has("tokens", "response_length"), read_slime),
    Format("verl dump", _has("input", "output", "score"), read_verl_dump),
    Format("verl parquet", _has("prompt", "reward_model"), read_verl_parquet),
    Format("verl parquet", _has("prompt", "responses"), read_verl_parquet),
    Format(
        "TRL completions",
        # verifiers saves its metrics as columns, and one may be named step
        lambda r: (
            _has("prompt", "completion")(r) and "example_id" not in r and ("step" in r or "advantage" in r)
        ),
        read_trl,
    ),
    Format("verifiers results", _has("prompt", "completion"), read_verifiers_results),
    Format("messages", _has("messages"), read_messages),
)


def detect_format(record: Any) -> Format | None:
    """The format that a record's fields are of, or None."""
    if not isinstance(record, dict):
        return None
    return next((known for known in FORMATS if known.matches(record)), None)


def import_trajectories(
    paths: str | Path | Iterable[str | Path],
    *,
    tokenizer: str | ChatTokenizer | None = None,
    vocab_size: int | None = None,
    allow_pickle: bool = False,
    skipped: list[BadRecord] | None = None,
    progress: Callable[[float], None] | None = None,
) -> Iterator[Trajectory]:
    """The trajectories of one or more files, one at a time, whatever wrote them.

    Read by content: agentrl's own files, OpenAI-style messages, tau-bench, SWE-agent, ATIF, verifiers,
    NeMo-RL, prime-rl, verl, TRL and, with `allow_pickle` (a pickle runs whatever code it holds), slime.
    Recorded token ids are kept exactly; text is tokenized with `tokenizer` (a Hugging Face name or folder, or
    None for the embedded Qwen one) and info['tokens'] says so. info['reward_recorded'] is False, and the
    reward 0, where the file holds none.

    ValueError (one line: file, record, field) at the first record that cannot be read; with a list as
    `skipped`, those are added to it and the rest is read. `progress` is called with the share of the files
    that is read, 0 to 1.
    """
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    for i, path in enumerate(files):
        source = Source(Path(path).stem, _tokenizer_maker(tokenizer), vocab_size)
        report = None if progress is None else _part(progress, i, len(files))
        yield from chain.from_iterable(_read_file(path, source, allow_pickle, skipped, report))


def _tokenizer_maker(tokenizer: str | ChatTokenizer | None) -> Callable[[], ChatTokenizer]:
    if tokenizer is None or isinstance(tokenizer, str):
        return lambda: load_tokenizer(tokenizer)
    return lambda: tokenizer


def _part(progress: Callable[[float], None], i: int, num_files: int) -> Callable[[float], None]:
    return lambda share: progress((i + share) / num_files)


def _read_file(
    path: str | Path,
    source: Source,
    allow_pickle: bool,
    skipped: list[BadRecord] | None,
    progress: Callable[[float], None] | None,
) -> Iterator[list[Trajectory]]:
    first: Format | None = None

    def read(raw: Any) -> list[Trajectory]:
        nonlocal first
        value = decode_json(raw) if raw is None or isinstance(raw, bytes) else raw
        if _is_conversation(value):
            value = {"messages": value}
        found = detect_format(value)
        if found is None and first is None:
            raise RecordError("", f"no known format: {_describe(value)}")
        if first is not None and found is not None and found.name != first.name:
            raise RecordError(
                "", f"mixed schemas: looks like {found.name}, but the file began as {first.name}"
            )
        if not isinstance(value, dict):
            raise RecordError("", f"no known format: {_describe(value)}")
        first = first or found
        assert first is not None
        return first.read(value, source)

    yield from read_each(path, _raw_values(path, allow_pickle, progress), read, skipped)


def _raw_values(
    path: str | Path, allow_pickle: bool, progress: Callable[[float], None] | None
) -> Generator[tuple[str, Any], None, None]:
    start = b""
    if not is_pipe(path):
        with open(path, "rb") as file:
            start = file.read(4)
    if is_parquet(path):
        yield from iter_parquet_rows(path, progress=progress)
    elif start == b"PK\x03\x04" or start[:1] == b"\x80":
        yield from _pickled_samples(path, allow_pickle)
    else:
        yield from _whole_conversations(iter_raw_records(path, progress=progress))


def _whole_conversations(records: Iterator[tuple[str, bytes | None]]) -> Iterator[tuple[str, Any]]:
    """The records, except that a file whose records are messages is one conversation."""
    for place, raw in records:
        try:
            value = decode_json(raw)
        except RecordError:
            value = None
        if not (isinstance(value, dict) and "role" in value and "content" in value):
            yield place, raw
            yield from records
            return
        yield "the conversation", [value, *(_decoded(raw) for _, raw in records)]
        return


def _decoded(raw: bytes | None) -> Any:
    try:
        return decode_json(raw)
    except RecordError as error:
        return f"{error}"  # no message, so the reader refuses the conversation there


def _pickled_samples(path: str | Path, allow_pickle: bool) -> Iterator[tuple[str, Any]]:
    if not allow_pickle:
        raise ValueError(
            f"{path}: a pickle (slime dump), and reading one runs whatever code it holds; "
            "--allow-pickle (allow_pickle=True) reads it if you trust who wrote it"
        )
    try:
        dump = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # unpickling runs the file's own code, which may raise anything
        raise ValueError(f"{path}: damaged after 0 records: {type(error).__name__}: {error}") from None
    samples = dump.get("samples") if isinstance(dump, dict) else None
    if not isinstance(samples, list) or not samples:
        raise ValueError(f"{path}: samples: missing or empty, so this is no slime rollout dump")
    for i, sample in enumerate(samples, 1):
        yield f"sample {i}", sample


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"fields {', '.join(list(value)[:8])}" if value else "an empty object"
    return f"a {type(value).__name__}, wanted an object"
