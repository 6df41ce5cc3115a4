"""The thirty BugFix tasks: real Python functions, each with one bug on one line.

Every family of bugs that is held out also occurs in training, and so does every repair, as `<` for `<=`; no
held-out function does. What is held out is thus the use of a known repair on an unknown function.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "heldout", "all"]
Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One test: the positional arguments of a call, and what the correct function returns for them."""

    arguments: Arguments
    wanted: Any


@dataclass(frozen=True, slots=True)
class Task:
    """A function with one bug, and the tests that tell whether it was fixed."""

    name: str  # the function's name, unique among all tasks
    family: str  # kind of bug
    source: str  # what the agent starts from: `fixed` with one wrong line
    fixed: str  # a correct version; never shown to the agent
    visible: tuple[Case, ...]  # what the agent's `run` executes
    hidden: tuple[Case, ...]  # what decides the reward


def reference_values(source: str, name: str, arguments: Sequence[Arguments]) -> list[Any]:
    """What the function `name` of `source` returns for each tuple of arguments, run in this process.

    For sources that this project wrote itself; the agent's code only ever runs in `gym/sandbox`.
    """
    scope: dict[str, Any] = {}
    exec(source, scope)
    return [scope[name](*copied(arguments_of_call)) for arguments_of_call in arguments]


def copied(value: Any) -> Any:
    """A deep copy of plain data, so that a function that changes its argument changes its own copy only."""
    if isinstance(value, list):
        return [copied(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, tuple):
        return tuple(copied(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    return value


def indentation(line: str) -> str:
    """The blanks that a line begins with."""
    return line[: len(line) - len(line.lstrip())]


def replaced(source: str, line: int, text: str) -> str:
    """The source with its line (1-based) replaced, indentation kept."""
    lines = source.split("\n")
    lines[line - 1] = indentation(lines[line - 1]) + text
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A task as written down below: the correct source, the bug as a line, arguments instead of cases."""

    split: Split
    family: str
    fixed: str
    line: int  # 1-based
    bug: str  # what stands on that line in the buggy version, without its indentation
    visible: tuple[Arguments, ...]
    hidden: tuple[Arguments, ...]

    def task(self) -> Task:
        source = replaced(self.fixed, self.line, self.bug)
        name = self.fixed[len("def ") : self.fixed.index("(")]
        visible, hidden = (
            tuple(map(Case, cases, reference_values(self.fixed, name, cases)))
            for cases in (self.visible, self.hidden)
        )
        return Task(name, self.family, source, self.fixed, visible, hidden)


_DRAFTS = (
    _Draft(
        "train",
        "comparison",
        "def positive(n):\n    return n > 0",
        2,
        "return n < 0",
        ((3,), (0,), (1,), (-1,)),
        ((7,), (-2,), (2,), (9,)),
    ),
    _Draft(
        "train",
        "comparison",
        "def floor_at(x, lo):\n    if x < lo:\n        return lo\n    return x",
        2,
        "if x > lo:",
        ((3, 5), (5, 3), (4, 4), (0, 1)),
        ((7, 2), (2, 9), (1, 6), (8, 8)),
    ),
    _Draft(
        "train",
        "comparison",
        "def rank(items, k):\n    count = 1\n    for x in items:\n        if x < k:\n"
        "            count += 1\n    return count",
        4,
        "if x <= k:",
        (([3], 3), ([1, 2], 5), ([], 2), ([4, 2], 2)),
        (([5, 5, 1], 5), ([0], 1), ([7, 8, 9], 8), ([2, 2], 2)),
    ),
    _Draft(
        "train",
        "off_by_one",
        "def sum_to(n):\n    total = 0\n    for i in range(n + 1):\n        total += i\n    return total",
        3,
        "for i in range(n):",
        ((1,), (3,), (0,), (2,)),
        ((4,), (5,), (6,), (7,)),
    ),
    _Draft(
        "train",
        "off_by_one",
        "def last_index(items):\n    return len(items) - 1",
        2,
        "return len(items)",
        (([3],), ([1, 2],), ([],), ([4, 2, 1],)),
        (([5, 5, 1, 2],), ([0, 0],), ([7],), ([2, 2, 2, 2, 2],)),
    ),
    _Draft(
        "train",
        "operator",
        "def area(a, b):\n    return a * b",
        2,
        "return a + b",
        ((3, 5), (2, 2), (0, 4), (1, 1)),
        ((7, 2), (1, 9), (6, 6), (3, 8)),
    ),
    _Draft(
        "train",
        "operator",
        "def mean(a, b):\n    d = a + b\n    return d // 2",
        2,
        "d = a - b",
        ((3, 5), (2, 2), (0, 4), (8, 0)),
        ((7, 1), (1, 9), (6, 6), (2, 8)),
    ),
    _Draft(
        "train",
        "variable",
        "def gap(k, x):\n    return x - k",
        2,
        "return x - x",
        ((3, 1), (2, 0), (1, 4), (5, 5)),
        ((4, 3), (6, 1), (0, 2), (5, 7)),
    ),
    _Draft(
        "train",
        "variable",
        "def scaled(a, b):\n    d = a * b\n    return d",
        2,
        "d = a * a",
        ((1, 2), (3, 0), (0, 4), (5, 1)),
        ((2, 7), (6, 3), (1, 9), (8, 2)),
    ),
    _Draft(
        "train",
        "initial",
        "def product(items):\n    total = 1\n    for x in items:\n        total *= x\n    return total",
        2,
        "total = 0",
        (([3],), ([1, 2],), ([],), ([4, 2],)),
        (([5, 1],), ([2, 2, 2],), ([7],), ([3, 3],)),
    ),
    _Draft(
        "train",
        "initial",
        "def count_zero(items):\n    count = 0\n    for x in items:\n        if x == 0:\n"
        "            count += 1\n    return count",
        2,
        "count = 1",
        (([0],), ([1, 2],), ([],), ([0, 2],)),
        (([5, 0, 0],), ([3],), ([0, 0, 0],), ([7, 8],)),
    ),
    _Draft(
        "train",
        "negation",
        "def nonzero(x):\n    return x != 0",
        2,
        "return x == 0",
        ((0,), (3,), (1,), (-1,)),
        ((5,), (2,), (-7,), (6,)),
    ),
    _Draft(
        "train",
        "negation",
        "def unique(items):\n    out = []\n    for x in items:\n        if x not in out:\n"
        "            out.append(x)\n    return out",
        4,
        "if x in out:",
        (([3],), ([1, 1],), ([],), ([4, 2],)),
        (([5, 1, 5],), ([2, 2, 2],), ([7, 8],), ([0, 3, 0],)),
    ),
    _Draft(
        "train",
        "swapped",
        "def minus(a, b):\n    return a - b",
        2,
        "return b - a",
        ((3, 5), (5, 3), (4, 4), (0, 1)),
        ((7, 2), (2, 9), (9, 1), (6, 0)),
    ),
    _Draft(
        "train",
        "return",
        "def doubled(a):\n    d = a * 2\n    return d",
        3,
        "return a",
        ((3,), (0,), (1,), (4,)),
        ((5,), (7,), (2,), (9,)),
    ),
    _Draft(
        "train",
        "comparison",
        "def below_two(n):\n    return n < 2",
        2,
        "return n <= 2",
        ((2,), (1,), (3,), (0,)),
        ((2,), (-2,), (5,), (4,), (6,)),
    ),
    _Draft(
        "train",
        "logic",
        "def both(a, b):\n    d = a and b\n    return d",
        2,
        "d = a or b",
        ((1, 0), (1, 2), (0, 0), (0, 3)),
        ((5, 0), (2, 7), (0, 4), (3, 2)),
    ),
    _Draft(
        "train",
        "builtin",
        "def clamp(x, lo, hi):\n    x = max(x, lo)\n    return min(x, hi)",
        2,
        "x = min(x, lo)",
        ((3, 1, 5), (0, 1, 5), (9, 1, 5), (2, 2, 4)),
        ((7, 0, 6), (1, 3, 4), (5, 2, 8), (4, 1, 2)),
    ),
    _Draft(
        "train",
        "constant",
        "def is_even(n):\n    return n % 2 == 0",
        2,
        "return n % 2 == 1",
        ((1,), (2,), (0,), (7,)),
        ((4,), (5,), (6,), (9,)),
    ),
    _Draft(
        "train",
        "update",
        "def total_of(items):\n    total = 0\n    for x in items:\n        total += x\n    return total",
        4,
        "total -= x",
        (([3],), ([1, 2],), ([],), ([4, 2],)),
        (([5, 1],), ([2, 2, 2],), ([7],), ([3, 3],)),
    ),
    _Draft(
        "heldout",
        "comparison",
        "def cap(x, hi):\n    if x > hi:\n        return hi\n    return x",
        2,
        "if x < hi:",
        ((3, 5), (5, 3), (4, 4), (0, 1)),
        ((7, 2), (2, 9), (1, 6), (8, 3)),
    ),
    _Draft(
        "heldout",
        "comparison",
        "def below(x, k):\n    return x < k",
        2,
        "return x <= k",
        ((3, 5), (5, 3), (4, 4), (0, 1)),
        ((7, 7), (2, 9), (9, 2), (1, 1)),
    ),
    _Draft(
        "heldout",
        "off_by_one",
        "def factorial(n):\n    total = 1\n    for i in range(1, n + 1):\n        total *= i\n"
        "    return total",
        3,
        "for i in range(1, n):",
        ((2,), (1,), (3,), (0,)),
        ((4,), (5,), (6,), (7,)),
    ),
    _Draft(
        "heldout",
        "operator",
        "def perimeter(a, b):\n    d = a + b\n    return d * 2",
        2,
        "d = a - b",
        ((1, 2), (3, 0), (0, 1), (2, 2)),
        ((2, 3), (4, 1), (1, 1), (0, 5)),
    ),
    _Draft(
        "heldout",
        "initial",
        "def power(a, n):\n    total = 1\n    for i in range(n):\n        total *= a\n    return total",
        2,
        "total = 0",
        ((2, 1), (3, 2), (5, 0), (2, 2)),
        ((2, 3), (4, 1), (1, 4), (3, 3)),
    ),
    _Draft(
        "heldout",
        "negation",
        "def without(items, k):\n    out = []\n    for x in items:\n        if x != k:\n"
        "            out.append(x)\n    return out",
        4,
        "if x == k:",
        (([3], 3), ([1, 2], 1), ([], 2), ([4, 2], 5)),
        (([5, 1, 5], 5), ([0], 1), ([7, 8], 8), ([2, 2], 2)),
    ),
    _Draft(
        "heldout",
        "comparison",
        "def under(x, hi):\n    if x < hi:\n        return 1\n    return 0",
        2,
        "if x <= hi:",
        ((3, 5), (4, 4), (5, 3), (0, 1)),
        ((7, 7), (2, 9), (9, 1), (6, 6)),
    ),
    _Draft(
        "heldout",
        "negation",
        "def differs(x, k):\n    return x != k",
        2,
        "return x == k",
        ((3, 5), (5, 3), (4, 4), (0, 1)),
        ((7, 2), (2, 2), (9, 1), (6, 6)),
    ),
    _Draft(
        "heldout",
        "builtin",
        "def lift(x, lo):\n    return max(x, lo)",
        2,
        "return min(x, lo)",
        ((3, 5), (5, 3), (4, 4), (0, 1)),
        ((7, 2), (2, 9), (9, 1), (6, 0)),
    ),
    _Draft(
        "heldout",
        "logic",
        "def if_both(x, k):\n    return x and k",
        2,
        "return x or k",
        ((1, 0), (1, 2), (0, 0), (3, 0)),
        ((5, 0), (2, 7), (4, 0), (3, 2)),
    ),
)


def make_tasks(split: Split = "all") -> tuple[Task, ...]:
    """The tasks of a split: 'train' 20, 'heldout' 10, 'all' 30 (train first), always in the same order.

    Raises ValueError for another split.

    >>> [len(make_tasks(split)) for split in ("train", "heldout", "all")]
    [20, 10, 30]
    """
    if split not in ("train", "heldout", "all"):
        raise ValueError(f"split must be 'train', 'heldout' or 'all', got {split!r}")
    return tuple(draft.task() for draft in _DRAFTS if split in ("all", draft.split))
