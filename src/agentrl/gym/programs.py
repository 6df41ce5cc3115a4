"""Procedurally generated programs with one bug, of the same families as the tasks but none of the tasks.

They are what the supervised start learns from.
"""

import builtins
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from agentrl.gym.rewrites import all_rewrites, is_variable, pieces
from agentrl.gym.sandbox import Outcome, same_value
from agentrl.gym.tasks import Case, Task, copied, make_tasks, replaced

NAMES = tuple(
    "cfghjlmopqrstuvwyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)  # of generated functions; no task or variable has one
NUM_CASES = 4
FAMILIES = (
    *("comparison", "off_by_one", "operator", "variable", "initial", "negation"),
    *("swapped", "return", "logic", "builtin", "constant", "update"),
)
_BUILTINS = frozenset(dir(builtins))
_HARD = ("swapped", "return", "variable")  # twice as often: their repairs take the most practice


@dataclass(frozen=True, slots=True)
class Program:
    """A generated function, correct, with a sampler of arguments."""

    name: str
    source: str
    parameters: tuple[str, ...]
    arguments: Callable[[random.Random], tuple[Any, ...]]

    def variables(self) -> list[str]:
        """Names in scope that hold data, in order of appearance."""
        tokens = (token for line in self.source.split("\n") for token in pieces(line))
        found = dict.fromkeys(token for token in tokens if is_variable(token))
        return [n for n in found if n not in (self.name, "append", "items") and n not in _BUILTINS]


def canonical(source: str) -> str:
    """The source with every name of its own replaced by its order of appearance: equal for renamed copies."""
    seen: dict[str, str] = {}

    def renamed(token: str) -> str:
        if not is_variable(token) or token in _BUILTINS or token == "append":
            return token
        return seen.setdefault(token, f"v{len(seen)}")

    return "\n".join(" ".join(map(renamed, pieces(line))) for line in source.split("\n"))


# ---- the grammar: each shape returns (parameters, body lines, kinds of the parameters: 'i' int, 'l' list)

Shape = tuple[tuple[str, ...], list[str], str]
_INDENT = "    "


_COMPARE = ("<", "<=", ">", ">=", "==", "!=")
_ARITHMETIC = ("+", "-", "*")


def _term(rng: random.Random, a: str, b: str) -> str:
    kind = rng.random()
    if kind < 0.2:
        return f"{rng.choice(['min', 'max'])}({a}, {b})"
    if kind < 0.35:
        return f"{a} {rng.choice(['//', '%'])} 2"
    return f"{a} {rng.choice(_ARITHMETIC)} {b}" if kind < 0.75 else f"{a} {rng.choice(_ARITHMETIC)} 2"


def _condition(rng: random.Random, a: str, b: str) -> str:
    if rng.random() < 0.2:
        return f"{a} % 2 {rng.choice(['==', '!='])} {rng.choice(['0', '1'])}"
    return f"{a} {rng.choice(_COMPARE)} {b}"


def _expression(rng: random.Random) -> Shape:
    kind = rng.randrange(8)
    if kind == 0:
        bound = rng.choice(["k", "lo", "hi"])
        return ("x", bound), [f"return x {rng.choice(_COMPARE)} {bound}"], "ii"
    if kind == 1:
        return ("n",), [f"return {_condition(rng, 'n', rng.choice('012'))}"], "i"
    if kind == 2:
        return ("x", "items"), [f"return x {rng.choice(['in', 'not in'])} items"], "il"
    a, b = rng.choice([("a", "b"), ("a", "b"), ("x", "k"), ("x", "lo"), ("n", "k")])
    if kind == 3:
        return (a, b), [f"return {a} {rng.choice(['and', 'or'])} {b}"], "ii"
    if kind == 4:
        f, g = rng.choice(["min", "max", "len", "sum"]), rng.choice(["min", "max", "len", "sum"])
        return ("items",), [f"return {f}(items) {rng.choice('+-')} {rng.choice([f'{g}(items)', '1'])}"], "l"
    if kind == 5:
        bound = rng.choice(["lo", "hi", "k"])
        return ("x", bound), [f"return {rng.choice(['min', 'max'])}(x, {bound})"], "ii"
    first, second = rng.choice([(a, b), (a, b), (b, a)])
    if kind == 6:
        first, second = rng.choice([(first, second), ("lo", "hi"), ("hi", "lo"), ("a", "2"), ("1", "x")])
        named = [name for name in (first, second) if not name.isdigit()]
        return tuple(sorted(named)), [f"return [{first}, {second}]"], "i" * len(named)
    return (a, b), [f"return {_term(rng, first, second)}"], "ii"


def _straight(rng: random.Random) -> Shape:
    a, b = rng.choice([("a", "b"), ("a", "b"), ("b", "a")])
    kind = rng.random()
    if kind < 0.1:
        logic = rng.choice(["and", "or"])
        return (
            ("a", "b"),
            [f"d = a {logic} b", rng.choice(["return d", f"return d {rng.choice('+-*')} b"])],
            "ii",
        )
    if kind < 0.2:
        first, second = rng.choice([("lo", "hi"), ("hi", "lo")])
        f, g = rng.choice(["min", "max"]), rng.choice(["min", "max"])
        return ("x", "lo", "hi"), [f"x = {f}(x, {first})", f"return {g}(x, {second})"], "iii"
    if kind < 0.3:
        f, g = rng.choice(["min", "max", "len", "sum"]), rng.choice(["min", "max", "len", "sum"])
        if rng.random() < 0.4:
            last = rng.choice(["return n - k", "return k - n", "return n + k", "return n", "return k * n"])
            return ("items", "k"), [f"n = {f}(items)", last], "li"
        last = rng.choice(["return a + b", "return b - a", "return a * b", "return [a, b]"])
        return ("items",), [f"a = {f}(items)", f"b = {g}(items)", last], "l"
    first = f"d = {_term(rng, a, b)}"
    if kind < 0.5:
        return ("a", "b"), [first, "return d"], "ii"
    if kind < 0.75:
        return ("a", "b"), [first, f"return {_term(rng, 'd', rng.choice(['a', 'b']))}"], "ii"
    last = rng.choice([f"return d {rng.choice(_ARITHMETIC)} e", "return [d, e]"])
    if kind < 0.87:
        first = f"d = a {rng.choice(['//', '%', '*', '+', '-'])} 2"
        return ("a",), [first, f"e = {_term(rng, 'a', 'd')}", last], "i"
    return ("a", "b"), [first, f"e = {_term(rng, b, rng.choice([a, 'd']))}", last], "ii"


def _branch(rng: random.Random) -> Shape:
    bound = rng.choice(["k", "lo", "hi", "0"])
    yes, no = rng.choice(
        [("x", bound), (bound, "x"), ("0", "x"), (bound, "0"), (f"x - {bound}", "x"), ("1", "0")]
    )
    condition = _condition(rng, "x", bound)
    parameters, kinds = (("x",), "i") if bound == "0" else (("x", bound), "ii")
    return parameters, [f"if {condition}:", f"{_INDENT}return {yes}", f"return {no}"], kinds


def _accumulate(rng: random.Random) -> Shape:
    over_items = rng.random() < 0.5
    v, header, parameters, kinds = (
        ("x", "for x in items:", ("items",), "l")
        if over_items
        else ("i", f"for i in range({rng.choice(['n', 'n + 1', '1, n', '1, n + 1'])}):", ("n",), "i")
    )
    op, start = rng.choice([("+=", "0"), ("-=", "0"), ("*=", "1")])
    if rng.random() < 0.5:
        value = rng.choice([v, v, f"{v} + 1", f"{v} * 2", "a"])
        if value == "a":
            parameters, kinds = ("a", *parameters), f"i{kinds}"
        return parameters, [f"total = {start}", header, f"{_INDENT}total {op} {value}", "return total"], kinds
    condition = _condition(rng, v, rng.choice(["k", "k", "0", "1"]))
    if "k" in condition:
        parameters, kinds = (*parameters, "k"), f"{kinds}i"
    acc, step = rng.choice([("count", f"count {rng.choice(['+=', '-='])} 1"), ("total", f"total {op} {v}")])
    start = "0" if acc == "count" else start
    body = [f"{acc} = {start}", header, f"{_INDENT}if {condition}:", f"{_INDENT * 2}{step}", f"return {acc}"]
    return parameters, body, kinds


def _collect(rng: random.Random) -> Shape:
    value = rng.choice(["x", "x", "x + 1", "x * 2", "x - 1"])
    if rng.random() < 0.3:
        return ("items",), ["out = []", "for x in items:", f"{_INDENT}out.append({value})", "return out"], "l"
    condition = rng.choice(
        [_condition(rng, "x", rng.choice(["k", "0"])), f"x {rng.choice(['in', 'not in'])} out"]
    )
    parameters, kinds = (("items", "k"), "li") if "k" in condition else (("items",), "l")
    body = ["out = []", "for x in items:", f"{_INDENT}if {condition}:", f"{_INDENT * 2}out.append({value})"]
    return parameters, [*body, "return out"], kinds


def _search(rng: random.Random) -> Shape:
    condition = rng.choice([f"x {rng.choice(_COMPARE[:4])} best", _condition(rng, "x", "0")])
    body = [
        f"best = {rng.choice('01')}",
        "for x in items:",
        f"{_INDENT}if {condition}:",
        f"{_INDENT * 2}best = x",
    ]
    return ("items",), [*body, "return best"], "l"


_SHAPES = (
    *(_expression, _expression, _expression, _straight, _straight),
    *(_branch, _accumulate, _accumulate, _collect, _search),
)


def _arguments(kinds: str) -> Callable[[random.Random], tuple[Any, ...]]:
    def draw(rng: random.Random) -> tuple[Any, ...]:
        return tuple(
            rng.randint(0, 6) if kind == "i" else [rng.randint(0, 6) for _ in range(rng.randint(1, 3))]
            for kind in kinds
        )

    return draw


def make_program(rng: random.Random) -> Program:
    """A random correct function of 2 to 6 lines; its parameters stand in any order."""
    parameters, body, kinds = rng.choice(_SHAPES)(rng)
    if len(parameters) == 1 and rng.random() < 0.3:  # an idle one
        parameters, kinds = (*parameters, "k"), f"{kinds}i"
    order = rng.sample(range(len(parameters)), len(parameters))
    parameters, kinds = tuple(parameters[i] for i in order), "".join(kinds[i] for i in order)
    name = rng.choice(NAMES)
    source = "\n".join([f"def {name}({', '.join(parameters)}):", *(_INDENT + line for line in body)])
    return Program(name, source, parameters, _arguments(kinds))


def task_shapes() -> frozenset[str]:
    """Canonical forms of the thirty tasks, buggy and fixed: what no generated program may equal."""
    return frozenset(canonical(text) for task in make_tasks() for text in (task.source, task.fixed))


def make_buggy(rng: random.Random, forbidden: frozenset[str]) -> tuple[Task, Program]:
    """A generated task and the program that it was made from.

    Mutants that no visible case tells from the correct function are dropped, and so is every program whose
    canonical form is in `forbidden`.
    """
    family = rng.choice((*FAMILIES, *_HARD))
    while True:
        program = make_program(rng)
        options = [o for o in all_rewrites(program.source, program.variables()) if o[0] == family]
        if not options or canonical(program.source) in forbidden:
            continue
        _, line, text = rng.choice(options)
        source = replaced(program.source, line, text)
        arguments = [program.arguments(rng) for _ in range(NUM_CASES)]
        wanted = run_trusted(program.source, program.name, arguments)
        if not all(outcome.ok for outcome in wanted) or canonical(source) in forbidden:
            continue
        got = run_trusted(source, program.name, arguments)
        if all(o.ok and same_value(o.value, w.value) for o, w in zip(got, wanted, strict=True)):
            continue
        cases = tuple(Case(a, w.value) for a, w in zip(arguments, wanted, strict=True))
        return Task(program.name, family, source, program.source, cases, cases), program


@functools.lru_cache(maxsize=4096)
def _compiled(source: str) -> CodeType | str:
    try:
        return compile(source, "<generated>", "exec")
    except SyntaxError as error:
        return type(error).__name__


def run_trusted(source: str, function: str, arguments: Sequence[tuple[Any, ...]]) -> list[Outcome]:
    """What `Sandbox.call` returns, computed in this process: only for sources that this module generated."""
    code = _compiled(source)
    if isinstance(code, str):
        return [Outcome(False, None, code)] * len(arguments)
    scope: dict[str, Any] = {}
    exec(code, scope)
    outcomes: list[Outcome] = []
    for arguments_of_call in arguments:
        try:
            value = scope[function](*copied(arguments_of_call))
        except (ArithmeticError, LookupError, NameError, TypeError, ValueError, AttributeError) as error:
            outcomes.append(Outcome(False, None, f"{type(error).__name__}: {error}"))
        else:
            nested = "..." in ascii(value)  # a list that was appended to itself
            outcomes.append(Outcome(False, None, "not plain data") if nested else Outcome(True, value, ""))
    return outcomes
