"""What the sandbox answers: values with their types, short errors, limits on time, cached by content."""

import pytest
from tests.gym.conftest import LIMITS, SANE, error_of, run

from agentrl.gym.sandbox import Limits, Outcome, Sandbox, same_value


def test_values_come_back_with_their_types(sandbox: Sandbox) -> None:
    source = "def f(x): return [x, (x,), {x}, {x: None}, True, 1.0, 'é\\ud800', 10**50]"
    (outcome,) = run(sandbox, source, 7)
    assert outcome == Outcome(True, [7, (7,), {7}, {7: None}, True, 1.0, "é\ud800", 10**50], "")
    assert same_value(outcome.value, [7, (7,), {7}, {7: None}, True, 1.0, "é\ud800", 10**50])


def test_arguments_are_fresh_for_each_case(sandbox: Sandbox) -> None:
    shared = [3]
    source = "seen = []\ndef f(x):\n    seen.append(x)\n    for s in seen: s.append(0)\n    return x"
    assert [o.value for o in run(sandbox, source, shared, shared)] == [[3, 0], [3, 0]]
    assert shared == [3]


@pytest.mark.parametrize(
    ("body", "error"),
    [("return 1 / 0", "ZeroDivisionError: division by zero"),
     ("import sys; sys.exit(0)", "SystemExit: 0"),
     ("import os; os._exit(0)", "process exited"),
     ("raise KeyboardInterrupt", "KeyboardInterrupt"),
     ("raise type('Odd', (BaseException,), {})('a\\nb\\x00')", "Odd: a b"),
     ("raise type('Mute', (Exception,), {'__str__': lambda s: 1 / 0})()", "Mute: (no message)"),
     ("raise type('Exits', (Exception,), {'__str__': lambda s: quit()})()", "Exits: (no message)"),
     ("raise ValueError(object())", "ValueError: <object object at 0x...>"),
     ("raise ValueError('x' * 10**6)", "ValueError: " + "x" * 185 + "..."),
     ("while True: pass", "timeout"),
     ("while True:\n        try:\n            while 1: pass\n        except BaseException: pass", "timeout"),
     ("return 'x' * 10**10", "memory limit"),
     ("return [0] * 10**8", "memory limit"),
     ("return f(x)", "RecursionError: maximum recursion depth exceeded"),
     ("return 'x' * 100_000", "result too large"),
     ("return [0] * 100_000", "result too large"),
     ("return 1 << 10**6", "result too large"),
     ("a = []; a.append(a); return a", "result nested too deeply"),
     ("return (i for i in [1])", "result is not plain data but generator"),
     ("return f", "result is not plain data but function"),
     ("return object", "result is not plain data but type"),
     ("return __import__('torch')", "ModuleNotFoundError: No module named 'torch'")],
)  # fmt: skip
def test_errors_are_short_and_exact(sandbox: Sandbox, body: str, error: str) -> None:
    assert error_of(sandbox, f"def f(x):\n    {body}") == error


@pytest.mark.parametrize(
    ("source", "error"),
    [("def f(x): return (1", "SyntaxError: '(' was never closed (line 1)"),
     ("f = 'x", "SyntaxError: unterminated string literal (detected at line 1) (line 1)"),
     ("g = 1", "NameError: the source defines no function 'f'"),
     ("f = 1", "NameError: the source defines no function 'f'"),
     ("import os; os._exit(0)", "process exited"),
     ("while True: pass", "timeout"),
     ("(" * 300, "SyntaxError: too many nested parentheses (line 1)"),
     ("raise SystemExit", "SystemExit")],
)  # fmt: skip
def test_a_source_that_does_not_load_fails_every_case(sandbox: Sandbox, source: str, error: str) -> None:
    assert run(sandbox, source, 1, 2, 3) == [Outcome(False, None, error)] * 3


def test_a_case_that_hangs_costs_only_itself(sandbox: Sandbox) -> None:
    source = "def f(x):\n    while x == 2: pass\n    return x"
    assert [o.value or o.error for o in run(sandbox, source, 1, 2, 3, 4)] == [1, "timeout", 3, 4]


def test_many_timeouts_end_the_call(sandbox: Sandbox) -> None:
    source = "def f(x):\n    while x > 1: pass\n    return x"
    skipped = "not run after too many timeouts"
    assert [o.value or o.error for o in run(sandbox, source, 1, 2, 3, 1, 1)] == [1, "timeout", "timeout"] + [
        skipped
    ] * 2


def test_cache_answers_with_fresh_values() -> None:
    with Sandbox(LIMITS, cache_size=2) as sandbox:
        source = "def f(x): return [x]"
        first = sandbox.call(source, "f", [(1,)])[0].value
        assert isinstance(first, list)
        first.append("spoiled")
        assert sandbox.call(source, "f", [(1,)]) == [Outcome(True, [1], "")]
        assert sandbox.num_runs == 1
        assert sandbox.call(source, "f", [(True,)]) == [Outcome(True, [True], "")]
        assert sandbox.call(source, "f", [(2,)])[0].value == [2]
        assert sandbox.num_runs == 3
        sandbox.call(source, "f", [(1,)])  # fell out of a cache of two
        assert sandbox.num_runs == 4


def test_a_wait_that_timed_out_is_not_cached() -> None:
    with Sandbox(Limits(wall_seconds=0.2)) as sandbox:
        for num_runs in (1, 2):
            assert sandbox.call("import time\ndef f(): time.sleep(9)", "f", [()])[0].error == "timeout"
            assert sandbox.num_runs == num_runs


def test_same_answers_from_another_parent(sandbox: Sandbox) -> None:
    source = "import random\ndef f(x): return [list({'a', 'b', 'c', 'd', 'e'}), random.random(), hash('x')]"
    with Sandbox(LIMITS) as other:
        assert run(other, source) == run(sandbox, source)


def test_bad_input_is_a_value_error() -> None:
    with Sandbox(LIMITS) as sandbox:
        assert sandbox.call(SANE, "f", []) == []
        with pytest.raises(ValueError, match="tuple"):
            sandbox.call(SANE, "f", [[1]])  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="not plain data"):
            sandbox.call(SANE, "f", [(object(),)])
    with pytest.raises(ValueError, match="cpu_seconds"):
        Limits(cpu_seconds=0)
    for bad in ({"memory_bytes": 1e6}, {"memory_bytes": 1 << 70}, {"processes": True}, {"timeouts": 0},
                {"wall_seconds": 1e9}, {"cpu_seconds": float("nan")}, {"open_files": 3}):  # fmt: skip
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
            Limits(**bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="cache_size"):
        Sandbox(cache_size=-1)


def test_extreme_limits_are_kept_to() -> None:
    with Sandbox(cache_size=0) as sandbox:
        for limits in (
            Limits(cpu_seconds=1e6, wall_seconds=1e6),
            Limits(memory_bytes=1 << 62, file_bytes=1 << 62, result_bytes=1 << 62, timeouts=1 << 62),
            Limits(memory_bytes=1 << 20, open_files=4, result_bytes=1, timeouts=1),
        ):
            sandbox.limits = limits
            for _ in range(2):  # from a child of its own, and from a spare
                assert run(sandbox, "def f(x): return x", 7) == [Outcome(True, 7, "")]
        forged = "import os\ndef f(x): os.write(3, b'V\\0\\0\\0\\x02' + b'77')"
        assert error_of(sandbox, forged) == "result too large"


def test_long_answers_are_not_kept() -> None:
    with Sandbox(LIMITS) as sandbox:
        for num_runs in (1, 2):
            assert sandbox.call("def f(): return 'x' * 20_000", "f", [()])[0].ok
            assert sandbox.num_runs == num_runs
