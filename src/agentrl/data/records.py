"""The records of a file of trajectories, one at a time, each with its place in the file.

The layer under `storage` and `importers`: it opens plain, gzip and zstandard files by their first bytes, cuts
JSON Lines and JSON arrays into records without holding the file, and turns whatever is wrong with one record
into one line that names the file, the record and the field.
"""

import gzip
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

T = TypeVar("T")

MAX_RECORD_BYTES = 256 * 2**20  # a million tokens with log-probs take about 30 MB of JSON
_CHUNK_BYTES = 2**20
# in a JSON text, everything between these is of no interest to where a record ends
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},]|"', re.DOTALL)


class RecordError(ValueError):
    """What is wrong with one record: raised while it is read, then given its place in the file."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.problem = problem


@dataclass(frozen=True, slots=True)
class BadRecord:
    """One record that could not be read: file, place in it ('line 3'), field ('' if the whole record)."""

    file: str
    place: str
    field: str
    problem: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.place, self.field, self.problem) if part)


def is_pipe(path: str | Path) -> bool:
    """Whether the path can be read once only: a pipe, as the shell makes of `<(...)`, or standard input."""
    mode = os.stat(path).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)


@contextmanager
def open_decompressed(file: io.BufferedReader, path: str | Path) -> Iterator[BinaryIO]:
    """The bytes of an open file, decompressed if the first of them say gzip or zstandard, whatever its name.

    Damaged compression is an OSError, EOFError or zlib.error while reading.
    """
    magic = file.peek(4)[:4]
    if magic in (b"PAR1", b"PK\x03\x04") and not file.seekable():
        raise ValueError(f"{path}: this kind of file cannot be read from a pipe; write it to disk first")
    if magic[:2] == b"\x1f\x8b":
        with gzip.open(file) as unzipped:
            yield unzipped  # pyright: ignore[reportReturnType]
    elif magic == b"\x28\xb5\x2f\xfd":
        yield io.BufferedReader(_ZstandardReader(file, zstandard(path)), _CHUNK_BYTES)
    else:
        yield file


class _ZstandardReader(io.RawIOBase):
    """Decompresses frame after frame; unlike zstandard's own reader it refuses a file cut inside a frame."""

    def __init__(self, file: BinaryIO, module: Any) -> None:
        self._file = file
        self._module = module
        self._frame: Any = None
        self._compressed = b""
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._compressed:
                self._compressed = self._file.read(_CHUNK_BYTES // 8)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstandard frame")
                return 0
            if self._frame is None:
                self._frame = self._module.ZstdDecompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(self._compressed)
            except self._module.ZstdError as error:
                raise OSError(str(error)) from None
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def zstandard(path: str | Path) -> Any:
    """The zstandard module; ValueError naming the extra where it is not installed."""
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ValueError(f"{path} is zstandard-compressed; pip install 'agentrl[zstd]' to use it") from None
    return zstandard


def iter_raw_records(
    path: str | Path,
    max_bytes: int = MAX_RECORD_BYTES,
    progress: Callable[[float], None] | None = None,
) -> Generator[tuple[str, bytes | None], None, None]:
    """(place, bytes) of each JSON record: 'line 3' of JSON Lines, 'record 3' of one array, or 'the document'.

    The bytes are None where a record is longer than `max_bytes`. A file that ends inside a record yields its
    remainder as the last record, for the reader to refuse. `progress` is called with the share of the file
    that is read, 0 to 1. ValueError: the file is empty or its compression is damaged.
    """
    num_records = 0
    with open(path, "rb") as stored, open_decompressed(stored, path) as file:
        size = max(1, os.fstat(stored.fileno()).st_size)
        try:
            for place, raw in _split(file, max_bytes):
                num_records += 1
                yield place, raw
                if progress is not None and stored.seekable():
                    progress(stored.tell() / size)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: damaged after {num_records} records: {error}") from None
    if num_records == 0:
        raise ValueError(f"{path}: no records in it; did the run that wrote it fail?")


def _split(file: BinaryIO, max_bytes: int) -> Iterator[tuple[str, bytes | None]]:
    start = file.read(_CHUNK_BYTES).removeprefix(b"\xef\xbb\xbf")
    num_blank = start.count(b"\n", 0, len(start) - len(start.lstrip()))
    start = start.lstrip()
    if start[:1] == b"[":
        yield from _split_array(file, start[1:], max_bytes)
    elif _is_one_document(start):
        whole = start + file.read(max_bytes + 1 - len(start))
        yield "the document", whole if len(whole) <= max_bytes else None
    else:
        yield from _split_lines(file, start, max_bytes, 1 + num_blank)


def _is_one_document(start: bytes) -> bool:
    """Whether the text is one object over several lines, rather than an object a line (or a damaged line)."""
    first, newline, rest = start.partition(b"\n")
    if not newline or first[:1] != b"{" or _is_object(first):
        return False
    second, newline, _ = rest.partition(b"\n")
    return not (newline and _is_object(second))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _split_lines(
    file: BinaryIO, block: bytes, max_bytes: int, number: int
) -> Iterator[tuple[str, bytes | None]]:
    pending: list[bytes] = []  # the blocks of a line that has not ended
    size, too_long = 0, False

    def line() -> tuple[str, bytes | None] | None:
        whole = b"".join(pending)
        if too_long or whole.strip():
            return f"line {number}", None if too_long else whole
        return None

    while block:
        *ended, rest = block.split(b"\n")
        for part in ended:
            pending.append(part)
            too_long = too_long or size + len(part) > max_bytes
            if found := line():
                yield found
            pending.clear()
            number, size, too_long = number + 1, 0, False
        pending.append(rest)
        size += len(rest)
        if size > max_bytes:
            pending.clear()
            too_long = True
        block = file.read(_CHUNK_BYTES)
    if found := line():
        yield found


def _split_array(file: BinaryIO, pending: bytes, max_bytes: int) -> Iterator[tuple[str, bytes | None]]:
    """Cut `element, element, ...]` at the commas of depth 0, holding one element at a time."""
    number, depth, too_long = 1, 0, False
    buffer = bytearray(pending)
    start = scan = 0  # the element's first byte, and the first byte not looked at
    while True:
        for match in _STRING_OR_BRACKET.finditer(buffer, scan):
            token = match.group() if match.end() - match.start() == 1 else b""
            if token == b'"':  # a string that goes on behind this block
                scan = match.start()
                break
            scan = match.end()
            if token in (b"[", b"{"):
                depth += 1
            elif token in (b"]", b"}") and depth:
                depth -= 1
            elif depth == 0 and token in (b",", b"]"):
                element = bytes(buffer[start : match.start()]).strip()
                if too_long or element or token == b",":
                    too_long = too_long or len(element) > max_bytes
                    yield f"record {number}", None if too_long else element
                number, too_long, start = number + 1, False, scan
                if token == b"]":
                    rest = (bytes(buffer[start:]) + file.read(_CHUNK_BYTES)).strip()
                    if rest:
                        yield "behind the array", rest
                    return
        del buffer[:start]
        scan, start = scan - start, 0
        if len(buffer) > max_bytes:  # drop the element, keep what says whether a string is open
            buffer[:] = buffer[scan : scan + 1] if buffer[scan : scan + 1] == b'"' else b""
            scan, too_long = 0, True
        block = file.read(
            max(_CHUNK_BYTES, len(buffer))
        )  # doubling: a long string is looked at twice at most
        if not block:
            break
        buffer += block
    if depth == 0 and not too_long and (element := bytes(buffer).strip()):
        yield f"record {number}", element
        number += 1
        buffer.clear()
    yield f"record {number}", None if too_long else bytes(buffer) or b" "  # no closing bracket: cut off


def decode_json(raw: bytes | None) -> Any:
    """The JSON value of a record. NaN and Infinity are let through, for the field's own check to name."""
    if raw is None:
        raise RecordError(
            "", f"longer than {MAX_RECORD_BYTES // 2**20} MiB; is the file one trajectory a record?"
        )
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        value = json.loads(raw)
        if b"\\ud" in raw.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise RecordError("", "holds half of a surrogate pair, which is no text") from None
    except json.JSONDecodeError as error:
        cut = "cut off, " if error.pos >= len(error.doc.rstrip()) or "Unterminated" in error.msg else ""
        raise RecordError("", f"{cut}not valid JSON at character {error.pos}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise RecordError("", f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise RecordError("", "nested too deep to be a trajectory") from None
    except ValueError:  # Python refuses to read thousands of digits
        raise RecordError("", "holds a whole number of thousands of digits") from None


def convert_record(value: Any, record_type: type[T]) -> T:
    """The value as a typed msgspec record; RecordError names the field that does not fit."""
    try:
        return msgspec.convert(value, record_type)
    except RecursionError:
        raise RecordError("", "nested too deep to be a trajectory") from None
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `")
        if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
            parent = where.strip("`$").lstrip(".")
            raise RecordError(f"{parent}.{missing[1]}".lstrip("."), "missing") from None
        raise RecordError(where.strip("`$").lstrip("."), problem[:1].lower() + problem[1:]) from None


def read_each(
    path: str | Path,
    raw: Generator[tuple[str, Any], None, None],
    read: Callable[[Any], T],
    skipped: list[BadRecord] | None,
) -> Iterator[T]:
    """`read` of every record; one that it refuses is a ValueError, or goes into `skipped` where given.

    However it ends, `raw` is closed then, and with it the file.
    """
    with closing(raw):
        for place, record in raw:
            try:
                value = read(record)
            except RecordError as error:
                bad = BadRecord(str(path), place, error.field, error.problem)
                if skipped is None:
                    raise ValueError(f"{bad}; --skip-bad (skipped=[]) reads the rest") from None
                skipped.append(bad)
            else:
                yield value
