"""Lengths of sequences as the caller has them: checked once, then int64."""

# N sequences

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Lengths = Iterable[int] | NDArray[Any] | Tensor

LARGEST = 2**62  # of a length and of their sum, so that no sum here leaves int64


def as_lengths(lengths: Lengths, name: str = "length") -> NDArray[np.int64]:
    """The lengths as int64 [N]; ValueError naming the index of one that is not a positive whole number.

    Also raises ValueError for anything but a vector, and where they add up to more than LARGEST.
    """
    if isinstance(lengths, Tensor):
        array = (lengths.double() if lengths.is_floating_point() else lengths).numpy(force=True)
    elif isinstance(lengths, np.ndarray):
        array = lengths
    elif isinstance(lengths, Iterable):
        array = _array_of(list(lengths), name)
    else:
        raise ValueError(f"{name}s must be a vector, got {lengths!r}")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1:
        raise ValueError(f"{name}s must be a vector, got shape {array.shape}")
    if array.dtype.kind == "O":
        array = _array_of(array.tolist(), name)
    if array.dtype.kind == "f":
        array = array.astype(np.float64)
        wrong = ~np.isfinite(array) | (array != np.floor(array)) | (array <= 0) | (array >= LARGEST)
    elif array.dtype.kind in "iu":
        wrong = (array <= 0) | (array > LARGEST)
    else:
        wrong = np.ones(array.shape, dtype=bool)
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise _not_a_length(name, index, array[index].item())
    if array.sum(dtype=np.float64) > LARGEST:
        raise ValueError(f"{name}s must add up to at most 2**62, got {sum(array.tolist())}")
    return array.astype(np.int64)


def _array_of(values: list[Any], name: str) -> NDArray[Any]:
    """A list as an array, without numpy's silent promotion of a bool among numbers."""
    kinds = set(map(type, values))
    if kinds <= {int}:
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError:
            index = next(i for i, value in enumerate(values) if abs(value) > LARGEST)
            raise _not_a_length(name, index, values[index]) from None
    scalars = [value.item() if _is_scalar(value) else value for value in values]
    for index, value in enumerate(scalars):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _not_a_length(name, index, value)
    return np.array(scalars) if any(isinstance(v, float) for v in scalars) else _array_of(scalars, name)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)


def _not_a_length(name: str, index: int, value: object) -> ValueError:
    is_large = isinstance(value, int | float) and value > LARGEST
    wanted = "at most 2**62" if is_large else "a positive whole number"
    return ValueError(f"{name} at index {index} must be {wanted}, got {value!r}")


def positive_whole(name: str, value: Any) -> int:
    """The value as an int of at most LARGEST, which bounds as much as a larger one does.

    ValueError with its name where it is not a positive whole number.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive whole number, got {value!r}")
    return min(int(value), LARGEST)


def one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """ValueError with the name and the choices where the value is none of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
