"""Fit an engine's four constants to a few measured rows, and say how wrong they are on the rows left out."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated

import numpy as np
import tomli_w
from numpy.typing import NDArray

from agentrl.plan.engine import Engine, EngineConstants
from agentrl.plan.inputs import Range, check_ranges, quoted, ranges_of, read_text

Vector = NDArray[np.float64]

_COLUMNS = ("input_tokens", "output_tokens", "concurrency", "output_tokens_per_second")
_FIELDS = ("step_seconds", "sequence_seconds", "bandwidth_share", "compute_share")
# What is known of an engine before it is measured: centre, and one standard deviation of the logarithm. It is
# weak, but it keeps a constant that the rows say nothing about from running away.
_PRIOR_CENTRE: Vector = np.log(np.array([2e-3, 1e-5, 0.8, 0.5]))
_PRIOR_SPREAD: Vector = np.array([0.7, 0.7, 0.2, 0.4])
_NOISE = 0.05  # relative error of a measured row, together with what the model leaves out


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured row: requests of input_tokens -> output_tokens, so many at a time, and what came out.

    Raises ValueError where a figure cannot be.
    """

    input_tokens: Annotated[int, Range(1, 1e9, "tokens")]
    output_tokens: Annotated[int, Range(1, 1e9, "tokens")]
    concurrency: Annotated[int, Range(1, 1e6, "requests")]
    output_tokens_per_second: Annotated[float, Range(1e-6, 1e12, "tokens/s")]

    def __post_init__(self) -> None:
        check_ranges(self, label=str)

    @property
    def setting(self) -> tuple[int, int, int]:
        """What was measured: input tokens, output tokens, concurrency."""
        return self.input_tokens, self.output_tokens, self.concurrency


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit, the rows it used, and its relative error on each row left out."""

    constants: EngineConstants
    fitted: tuple[Measurement, ...]
    held_out: tuple[Measurement, ...]
    held_out_errors: tuple[float, ...]  # predicted / measured - 1

    @property
    def at_the_edge(self) -> tuple[str, ...]:
        """The constants within 1 % of the end of their range: no engine there explains the rows."""
        ranges = ranges_of(EngineConstants)
        found = {field: getattr(self.constants, field) for field in _FIELDS}
        return tuple(
            field
            for field, value in found.items()
            if not 1.01 * ranges[field].least < value < 0.99 * ranges[field].most
        )

    @property
    def mean_error(self) -> float:
        """Mean absolute relative error on the rows left out; NaN where every row was fitted."""
        return float(np.mean(np.abs(self.held_out_errors))) if self.held_out_errors else float("nan")

    @property
    def max_error(self) -> float:
        """Largest absolute relative error on the rows left out; NaN where every row was fitted."""
        return float(np.max(np.abs(self.held_out_errors))) if self.held_out_errors else float("nan")


def read_measurements(path: str | Path) -> list[Measurement]:
    """Rows of a CSV file with the columns input_tokens, output_tokens, concurrency, output_tokens_per_second.

    Other columns and empty lines are ignored. Raises ValueError naming the file, and the line and column
    where one is wrong.
    """
    reader = csv.reader(io.StringIO(read_text(path)))
    rows: list[Measurement] = []
    no_cells: list[str] = []
    try:
        named = next((cells for cells in reader if any(cell.strip() for cell in cells)), no_cells)
        header = [cell.strip() for cell in named]
        twice = [column for column in _COLUMNS if header.count(column) > 1]
        if twice:
            raise ValueError(f"{path} has the columns {twice} twice; keep one of each")
        missing = [column for column in _COLUMNS if column not in header]
        if missing:
            raise ValueError(
                f"{path} lacks the columns {missing}; the first line must name {', '.join(_COLUMNS)}"
            )
        for cells in reader:
            if any(cell.strip() for cell in cells):
                found = dict(zip(header, cells, strict=False))
                rows.append(_measurement(found, f"{path}, line {reader.line_num}"))
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def _measurement(cells: Mapping[str, str], where: str) -> Measurement:
    numbers: dict[str, float] = {}
    for column in _COLUMNS:
        text = cells.get(column, "").strip()
        try:
            numbers[column] = float(text)
        except ValueError as error:
            raise ValueError(f"{where}: {column} must be a number, got {quoted(text)}") from error
        ranges_of(Measurement)[column].check(f"{where}: {column}", numbers[column])
        if column in _COLUMNS[:3] and numbers[column] % 1:
            raise ValueError(f"{where}: {column} must be a whole number, got {text!r}")
    prompt, output, concurrency = (int(numbers[column]) for column in _COLUMNS[:3])
    return Measurement(prompt, output, concurrency, numbers[_COLUMNS[3]])


def merge_repeats(rows: Sequence[Measurement]) -> list[Measurement]:
    """One row a setting, with the geometric mean of its rates, in the order of first appearance.

    A repeat of a fitted row tests the noise, not the fit; so it must not be among the rows left out.

    >>> merge_repeats([Measurement(8, 8, 1, 2.0), Measurement(8, 8, 2, 3.0), Measurement(8, 8, 1, 8.0)])[0]
    Measurement(input_tokens=8, output_tokens=8, concurrency=1, output_tokens_per_second=4.0)
    """
    rates: dict[tuple[int, int, int], list[float]] = {}
    for row in rows:
        rates.setdefault(row.setting, []).append(row.output_tokens_per_second)
    return [Measurement(*setting, geometric_mean(found)) for setting, found in rates.items()]


def check_requests_fit(engine: Engine, rows: Sequence[Measurement]) -> None:
    """Raise ValueError for the first row whose request the engine's cache cannot hold, so cannot have been
    measured."""
    for row in rows:
        tokens = row.input_tokens + row.output_tokens
        if engine.max_sequences(tokens) < 1:
            raise ValueError(
                f"a request of {row.input_tokens:,} + {row.output_tokens:,} tokens cannot be: the cache of "
                f"{engine.tensor_parallel} x {engine.gpu.name} holds {engine.max_sequences(tokens):.2g} of "
                "it; check --model, --gpu, --tensor-parallel, --weight-bits, --kv-bits and --cache-tokens"
            )


def choose_rows(engine: Engine, rows: Sequence[Measurement], num_rows: int = 5) -> list[int]:
    """Indices of the rows to fit on: those that say most about the constants, from their settings alone.

    Greedy D-optimal design: each next row raises the determinant of the information about the constants most,
    computed at the prior; no measured rate is looked at. So it also says which rows to measure.
    """
    if not 1 <= num_rows <= len(rows):
        raise ValueError(f"cannot choose {num_rows} of {len(rows)} rows")
    slopes = _slopes(engine, rows, _PRIOR_CENTRE) / _NOISE
    information = np.diag(_PRIOR_SPREAD**-2)
    chosen: list[int] = []
    for _ in range(num_rows):
        inverse = np.linalg.inv(information)
        gains = np.einsum("ri,ij,rj->r", slopes, inverse, slopes)
        gains[chosen] = -1.0
        best = int(np.argmax(gains))
        chosen.append(best)
        information = information + np.outer(slopes[best], slopes[best])
    return chosen


def fit(
    engine: Engine, rows: Sequence[Measurement], chosen: Sequence[int], name: str = "fitted"
) -> Calibration:
    """Constants that explain the chosen rows, and the errors on the others that are not repeats of them.

    Maximum a posteriori in the logarithms: relative errors of the rate against the prior above, by damped
    Gauss-Newton steps. `engine` gives the model, the GPU and the memory; its four constants are not used.
    """
    used = [rows[i] for i in chosen]
    if not used:
        raise ValueError("choose at least one row to fit")
    measured = np.log([row.output_tokens_per_second for row in used])

    def residuals(point: Vector) -> Vector:
        data = (_log_rates(engine, used, point) - measured) / _NOISE
        return np.concatenate([data, (point - _PRIOR_CENTRE) / _PRIOR_SPREAD])

    point: Vector = _PRIOR_CENTRE.copy()
    now, damping = residuals(point), 1.0
    for _ in range(200):
        jacobian = np.vstack([_slopes(engine, used, point) / _NOISE, np.diag(1 / _PRIOR_SPREAD)])
        normal = jacobian.T @ jacobian
        damped = normal + damping * np.diag(np.diag(normal))
        move = np.asarray(np.linalg.solve(damped, -jacobian.T @ now), np.float64)
        trial = residuals(point + move) if _possible(point + move) else None
        if trial is not None and trial @ trial < now @ now:
            point, now, damping = point + move, trial, damping / 5
            if float(np.abs(move).max()) < 1e-9:
                break
        else:
            damping *= 5
            if damping > 1e12:
                break
    fitted = _with_constants(engine, point)
    seen = {row.setting for row in used}
    held_out = tuple(row for row in rows if row.setting not in seen)
    errors = tuple(
        fitted.serving_tokens_per_second(row.input_tokens, row.output_tokens, row.concurrency)
        / row.output_tokens_per_second
        - 1
        for row in held_out
    )
    return Calibration(replace(fitted.constants, name=name), tuple(used), held_out, errors)


def leave_one_out(engine: Engine, rows: Sequence[Measurement]) -> tuple[float, ...]:
    """Relative error on each row of a fit on all the others: what to report where every row is needed to fit.

    Raises ValueError for fewer than two rows, and where two have one setting (`merge_repeats` them).
    """
    if len({row.setting for row in rows}) < len(rows):
        raise ValueError("rows of one setting cannot be left out one by one; merge_repeats them first")
    if len(rows) < 2:
        raise ValueError(f"leaving one out needs two rows at least, got {len(rows)}")
    every = range(len(rows))
    return tuple(fit(engine, rows, [j for j in every if j != i]).held_out_errors[0] for i in every)


def overhead_bytes(engine: Engine, cache_tokens: float) -> float:
    """Memory outside weights and cache, a GPU, that explains the number of cache tokens an engine reports.

    Raises ValueError where the GPUs cannot hold so many tokens beside the weights.
    """
    held = cache_tokens * engine.shape.kv_bytes_per_token(engine.kv_bytes_each)
    taken = engine.gpu.memory_bytes * engine.constants.memory_utilization * engine.tensor_parallel
    left = taken - engine.shape.weight_bytes(engine.weight_bytes_each)
    if held > left:
        most = math.floor(left / engine.shape.kv_bytes_per_token(engine.kv_bytes_each))
        raise ValueError(
            f"{cache_tokens:,.0f} tokens of cache cannot be: beside the weights of {engine.shape.name}, "
            f"{engine.tensor_parallel} x {engine.gpu.name} hold at most {most:,}; check --cache-tokens, "
            "--gpu, --tensor-parallel, --weight-bits, --kv-bits and --memory-utilization"
        )
    return (left - held) / engine.tensor_parallel


def constants_to_toml(constants: EngineConstants) -> str:
    """The constants as TOML text, for `--engine-file`."""
    return tomli_w.dumps(asdict(constants))


def _possible(point: Vector) -> bool:
    # inside the ranges, with room for the steps of the slopes
    ranges = ranges_of(EngineConstants)
    return all(
        1.001 * ranges[field].least <= value <= 0.999 * ranges[field].most
        for field, value in zip(_FIELDS, np.exp(np.clip(point, -700, 700)), strict=True)
    )


def _with_constants(engine: Engine, point: Vector) -> Engine:
    values = {field: float(value) for field, value in zip(_FIELDS, np.exp(point), strict=True)}
    return replace(engine, constants=replace(engine.constants, **values))


def _log_rates(engine: Engine, rows: Sequence[Measurement], point: Vector) -> Vector:
    trial = _with_constants(engine, point)
    return np.log([
        trial.serving_tokens_per_second(row.input_tokens, row.output_tokens, row.concurrency) for row in rows
    ])  # fmt: skip


def _slopes(engine: Engine, rows: Sequence[Measurement], point: Vector) -> Vector:
    step = 1e-5
    moved = [point + step * direction for direction in np.eye(len(point))]
    back = [point - step * direction for direction in np.eye(len(point))]
    columns = [
        _log_rates(engine, rows, a) - _log_rates(engine, rows, b) for a, b in zip(moved, back, strict=True)
    ]
    return np.stack(columns, axis=1) / (2 * step)
