"""What a GPU can do at its peak: arithmetic, memory bandwidth, memory. The table is `gpus.toml`, beside this
file."""

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agentrl.plan.inputs import Range, parse_text, read_text

_TABLE = Path(__file__).with_name("gpus.toml")
_KEYS = {
    "bf16_tflops": Range(1e-3, 1e6, "TFLOP/s"),
    "bandwidth_gbs": Range(1e-3, 1e7, "GB/s"),
    "memory_mib": Range(1, 1e10, "MiB"),
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's peak figures, dense, with the document that they come from.

    Raises ValueError where a figure is not positive.
    """

    name: str
    flops_per_second: float  # bfloat16 matrix products
    bytes_per_second: float  # device memory
    memory_bytes: float  # what the driver reports
    source: str

    def __post_init__(self) -> None:
        for field in ("flops_per_second", "bytes_per_second", "memory_bytes"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"GPU {self.name!r}: {field} must be positive, got {value}")


def gpus_from_toml(text: str, file: str = "the GPU file") -> dict[str, Gpu]:
    """GPUs by name from TOML text: a table a GPU with bf16_tflops, bandwidth_gbs, memory_mib and source.

    Raises ValueError, naming the file, for text that is not TOML, for unknown keys and for figures that are
    missing or cannot be.

    >>> gpus_from_toml('''[mine]
    ... bf16_tflops = 100
    ... bandwidth_gbs = 500
    ... memory_mib = 16384
    ... source = "measured"''')["mine"].bytes_per_second
    500000000000.0
    """
    tables: dict[str, object] = parse_text(text, tomllib.loads, "TOML", file)
    found: dict[str, Gpu] = {}
    for name, table in tables.items():
        if not (name.strip() and name.isprintable()):
            raise ValueError(f"{file}: a GPU's name must be printable text, got {name!r}")
        if not isinstance(table, dict):
            raise ValueError(f"{file} holds {name!r} outside a table; write [NAME] above each GPU's figures")
        figures = cast(dict[str, Any], table)
        unknown = sorted(set(figures) - {*_KEYS, "source"})
        if unknown:
            raise ValueError(
                f"{file}: GPU {name!r} has unknown keys {unknown}; the keys are {[*_KEYS, 'source']}"
            )
        for key, wanted in _KEYS.items():
            value = figures.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{file}: GPU {name!r} needs a number for {key}, got {value!r}")
            wanted.check(f"{file}: GPU {name!r}: {key}", value)
        found[name] = Gpu(
            name=name,
            flops_per_second=float(figures["bf16_tflops"]) * 1e12,
            bytes_per_second=float(figures["bandwidth_gbs"]) * 1e9,
            memory_bytes=float(figures["memory_mib"]) * 2**20,
            source=str(figures.get("source", "user-defined")),
        )
    return found


def load_gpus(path: str | Path | None = None) -> dict[str, Gpu]:
    """The built-in GPUs by name, with those of the TOML file at `path` added (they win over a built-in
    name)."""
    found = gpus_from_toml(read_text(_TABLE))
    if path is not None:
        found |= gpus_from_toml(read_text(path), str(path))
    return found


def find_gpu(name: str, gpus: Mapping[str, Gpu] | None = None) -> Gpu:
    """The GPU called `name`, whatever its case, spaces and hyphens. ValueError with the nearest name
    otherwise.

    >>> find_gpu("h200").flops_per_second
    989000000000000.0
    """
    table = load_gpus() if gpus is None else gpus
    by_key = {_key(known): gpu for known, gpu in table.items()}
    if _key(name) in by_key:
        return by_key[_key(name)]
    nearest = by_key[difflib.get_close_matches(_key(name), by_key, n=1, cutoff=0.0)[0]].name
    known = ", ".join(table)
    raise ValueError(f"no GPU {name!r}; did you mean {nearest!r}? known are {known} (--gpu-file adds others)")


def _key(name: str) -> str:
    key = name.lower().replace(" ", "").replace("-", "").replace("_", "")
    for suffix in ("80gb", "80", "sxm"):  # "A100-80" and "H100 SXM" are the cards in the table
        key = key.removesuffix(suffix)
    return key
