"""Functions that run as they are written, also where torch.compile traces their callers."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, before which torch.compile ends its graph, as with `torch.compiler.disable`.

    As a decorator that would load the compiler with this package; here it is loaded by whoever compiles. The
    tiled head writes tile after tile to the same memory, in sizes that depend on data: tracing it fails.
    fullgraph=True forbids what this does, and is refused by the compiler.

    >>> @uncompiled
    ... def double(x: torch.Tensor) -> torch.Tensor:
    ...     return 2 * x
    >>> double(torch.tensor(3.0))
    tensor(6.)
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            apart = cast(Callable[P, R], torch.compiler.disable(function))
            return apart(*args, **kwargs)
        return function(*args, **kwargs)

    return run
