"""What a user may give: figures that keep to a range, and text files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

Note = TypeVar("Note")


@dataclass(frozen=True, slots=True)
class Range:
    """Where a figure makes sense, both ends included, and its unit.

    Wide enough for any run there could be, narrow enough that no sum of the planner over- or underflows.

    >>> Range(1, 100, "GPUs").check("--gpus", 0)
    Traceback (most recent call last):
    ...
    ValueError: --gpus must be at least 1, got 0
    """

    least: float
    most: float
    unit: str

    def check(self, name: str, value: float) -> None:
        """Raise ValueError, by name, for a value outside and for NaN, which is in no range."""
        if self.least <= value <= self.most:
            return
        if value < self.least:
            wanted = f"at least {_written(self.least)}"
        elif value > self.most:
            wanted = f"at most {_written(self.most)}"
        else:
            wanted = f"a number from {_written(self.least)} to {_written(self.most)}"
        raise ValueError(f"{name} must be {wanted}, got {_written(value)}")

    def clamp(self, value: float) -> float:
        """The value, or the end of the range that is nearest to it."""
        return min(max(value, self.least), self.most)


def flag_of(field: str) -> str:
    """The option that sets a field.

    >>> flag_of("tool_seconds")
    '--tool-seconds'
    """
    return "--" + field.replace("_", "-")


def notes_of(owner: type, kind: type[Note]) -> dict[str, Note]:
    """Field -> the note of that kind (a `Doc`, a `Range`) in its annotation, for the fields that have one."""
    hints = _hints(owner)
    found: dict[str, Note] = {}
    for entry in fields(owner):
        for note in getattr(hints[entry.name], "__metadata__", ()):
            if isinstance(note, kind):
                found[entry.name] = note
    return found


@cache
def ranges_of(owner: type) -> Mapping[str, Range]:
    """Field -> its range."""
    return notes_of(owner, Range)


@cache
def _hints(owner: type) -> dict[str, Any]:
    return get_type_hints(owner, include_extras=True)


def check_ranges(part: object, label: Callable[[str], str] = flag_of) -> None:
    """Raise ValueError for the first field outside its range; a field that is None is unset."""
    for name, wanted in ranges_of(type(part)).items():
        value = getattr(part, name)
        if value is not None:
            wanted.check(label(name), value)


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, without a byte-order mark. ValueError, by name, where it is none."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file: byte {error.start} is not text") from error


def parse_text(text: str, loads: Callable[[str], Any], kind: str, file: str) -> Any:
    """What `loads` makes of a file's text. ValueError, by the file's name, where it is not of that kind.

    >>> import json
    >>> parse_text("[" * 100_000, json.loads, "JSON", "config.json")
    Traceback (most recent call last):
    ...
    ValueError: config.json is not JSON: it is nested too deep
    """
    try:
        return loads(text)
    except RecursionError as error:
        raise ValueError(f"{file} is not {kind}: it is nested too deep") from error
    except ValueError as error:  # the decoders' own errors, and an integer of too many digits
        raise ValueError(f"{file} is not {kind}: {error}") from error


def quoted(text: str) -> str:
    """What somebody wrote, in quotes and not too long.

    >>> quoted("1e3"), quoted("9" * 400)
    ("'1e3'", "'999999999999999999999999'...")
    """
    return repr(text) if len(text) <= 24 else f"{text[:24]!r}..."


def _written(value: float) -> str:
    text = f"{value:g}" if isinstance(value, float) and abs(value) < 1e-2 else f"{value:,}"
    text = text.removesuffix(".0")
    return text if len(text) <= 24 else f"{text[:8]}... ({len(text)} characters)"
