"""Fit an engine's four constants to a few measured rows, and say how wrong they are on the rows left out."""

import csv
import io
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import tomli_w
from numpy.typing import NDArray

from agentrl.plan.engine import Engine, EngineConstants
from agentrl.plan.models import check_positive

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

    Raises ValueError where a figure is not positive.
    """

    input_tokens: int
    output_tokens: int
    concurrency: int
    output_tokens_per_second: float

    def __post_init__(self) -> None:
        check_positive(**{name: getattr(self, name) for name in _COLUMNS})


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit, the rows it used, and its relative error on each row left out."""

    constants: EngineConstants
    fitted: tuple[Measurement, ...]
    held_out: tuple[Measurement, ...]
    held_out_errors: tuple[float, ...]  # predicted / measured - 1

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

    Other columns are ignored. Raises ValueError naming the line.
    """
    reader = csv.DictReader(io.StringIO(Path(path).read_text(encoding="utf-8")))
    missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(
            f"{path} lacks the columns {missing}; the first line must name {', '.join(_COLUMNS)}"
        )
    rows: list[Measurement] = []
    for number, row in enumerate(reader, start=2):
        try:
            prompt, output, concurrency = (int(row[column]) for column in _COLUMNS[:3])
            rows.append(Measurement(prompt, output, concurrency, float(row[_COLUMNS[3]])))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


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
    """Constants that explain the chosen rows, and the errors on the others.

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
        trial = residuals(point + move)
        if trial @ trial < now @ now:
            point, now, damping = point + move, trial, damping / 5
            if float(np.abs(move).max()) < 1e-9:
                break
        else:
            damping *= 5
            if damping > 1e12:
                break
    fitted = _with_constants(engine, point)
    left = set(range(len(rows))) - set(chosen)
    held_out = tuple(rows[i] for i in sorted(left))
    errors = tuple(
        fitted.serving_tokens_per_second(row.input_tokens, row.output_tokens, row.concurrency)
        / row.output_tokens_per_second
        - 1
        for row in held_out
    )
    return Calibration(replace(fitted.constants, name=name), tuple(used), held_out, errors)


def leave_one_out(engine: Engine, rows: Sequence[Measurement]) -> tuple[float, ...]:
    """Relative error on each row of a fit on all the others: what to report where every row is needed to fit.

    Raises ValueError for fewer than two rows.
    """
    if len(rows) < 2:
        raise ValueError(f"leaving one out needs two rows at least, got {len(rows)}")
    every = range(len(rows))
    return tuple(fit(engine, rows, [j for j in every if j != i]).held_out_errors[0] for i in every)


def overhead_bytes(engine: Engine, cache_tokens: float) -> float:
    """Memory outside weights and cache that explains the number of cache tokens that an engine reports."""
    held = cache_tokens * engine.shape.kv_bytes_per_token(engine.kv_bytes_each)
    taken = engine.gpu.memory_bytes * engine.constants.memory_utilization * engine.tensor_parallel
    return (taken - engine.shape.weight_bytes(engine.weight_bytes_each) - held) / engine.tensor_parallel


def constants_to_toml(constants: EngineConstants) -> str:
    """The constants as TOML text, for `--engine-file`."""
    return tomli_w.dumps(asdict(constants))


def constants_from_toml(text: str) -> EngineConstants:
    """Constants from TOML text. Raises ValueError for unknown or missing keys and for wrong values."""
    try:
        return EngineConstants(**tomllib.loads(text))
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise ValueError(f"the engine file does not describe an engine: {error}") from error


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
