"""Lengths of sequences as the caller has them: checked once, then int64."""

# N sequences

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Lengths = Sequence[int] | NDArray[Any] | Tensor


def as_lengths(lengths: Lengths) -> NDArray[np.int64]:
    """The lengths as int64 [N]; ValueError naming the index of one that is not a positive whole number."""
    if isinstance(lengths, Tensor):
        array = (lengths.double() if lengths.is_floating_point() else lengths).numpy(force=True)
    elif isinstance(lengths, np.ndarray):
        array = lengths
    else:
        array = _array_of(list(lengths))
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1:
        raise ValueError(f"lengths must be a vector, got shape {array.shape}")
    if array.dtype.kind == "f":
        wrong = ~np.isfinite(array) | (array != np.floor(array)) | (array <= 0) | (array >= 2.0**62)
    elif array.dtype.kind in "iu":
        wrong = (array <= 0) | (array > 2**62)
    else:
        wrong = np.ones(array.shape, dtype=bool)
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise _not_a_length(index, array[index])
    return array.astype(np.int64)


def _array_of(values: list[Any]) -> NDArray[Any]:
    """A list as an array, without numpy's silent promotion of a bool among numbers."""
    kinds = set(map(type, values))
    if kinds <= {int}:
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError:
            index = next(i for i, value in enumerate(values) if abs(value) > 2**62)
            raise _not_a_length(index, values[index]) from None
    scalars = [value.item() if isinstance(value, Tensor | np.generic) else value for value in values]
    for index, value in enumerate(scalars):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _not_a_length(index, value)
    return np.array(scalars) if any(isinstance(v, float) for v in scalars) else _array_of(scalars)


def _not_a_length(index: int, value: object) -> ValueError:
    return ValueError(f"length at index {index} must be a positive whole number, got {value!r}")


def positive_whole(name: str, value: Any) -> int:
    """The value as an int; ValueError with its name where it is not a positive whole number."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}")
    return int(value)


def one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """ValueError with the name and the choices where the value is none of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
