"""Results of a benchmark that can be stopped and started again: a file of JSON lines."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def commit() -> str:
    """The commit of this checkout, short."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return found.stdout.strip() or "unknown"


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, none where there is no file; a line that a crash cut off is none."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def append(path: Path, record: dict[str, Any]) -> None:
    """Put a record behind the others, and on the disk; a line that was cut off stays a line of its own."""
    is_cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * is_cut + json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
