"""Code that nobody trusts gains nothing and breaks nothing, with namespaces and without."""

import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.gym.sandbox import Limits, Outcome, Sandbox, same_value

LIMITS = Limits(cpu_seconds=0.15, wall_seconds=5.0, memory_bytes=64 << 20)
SANE = "def f(x): return x + 1"


# what is left out: nothing; what an ordinary user in a container lacks; what a kernel without seccomp lacks
SETTINGS = {"whole": (), "container": ("namespaces", "root", "user"), "unfiltered": ("filter",)}


def may_change_user() -> bool:
    """Whether root has the capability CAP_SETUID; for anybody else the limit on processes holds as it is."""
    effective = int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16)
    return os.getuid() != 0 or bool(effective >> 7 & 1)


@pytest.fixture(scope="module", params=SETTINGS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if request.param == "unfiltered" and not may_change_user():
        pytest.skip("refused: nothing would stop a fork bomb")
    with Sandbox(LIMITS, without=SETTINGS[request.param]) as made:
        yield made


def run(sandbox: Sandbox, source: str, *cases: object) -> list[Outcome]:
    """The outcomes of f(x) for each x, by default of one; afterwards the sandbox must still be whole."""
    outcomes = sandbox.call(source, "f", [(x,) for x in cases or (1,)])
    sandbox._cache.clear()  # pyright: ignore[reportPrivateUsage]
    assert sandbox.call(SANE, "f", [(1,)]) == [Outcome(True, 2, "")]
    return outcomes


def error_of(sandbox: Sandbox, source: str) -> str:
    (outcome,) = run(sandbox, source)
    assert not outcome.ok
    assert outcome.value is None
    assert "\n" not in outcome.error
    return outcome.error


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


def test_deep_recursion_in_c_is_a_crash_or_a_limit(sandbox: Sandbox) -> None:
    source = "import sys\ndef f(x):\n    sys.setrecursionlimit(10**9)\n    return sorted([0], key=f)"
    assert error_of(sandbox, source) in ("process crashed (SIGSEGV)", "memory limit")


LYING = """
class Liar(int):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = int.__hash__
class Yes:
    __eq__ = Liar.__eq__
    __hash__ = lambda self: 1
    def __reduce__(self): return (print, ())
def f(x): return {1: Liar(3), 2: Yes(), 3: [Liar(3)], 4: {Yes(): 1}, 5: Yes}[x]
"""


def test_a_lying_eq_never_leaves(sandbox: Sandbox) -> None:
    errors = [o.error for o in run(sandbox, LYING, 1, 2, 3, 4, 5)]
    assert errors == [
        f"result is not plain data but {name}" for name in ("Liar", "Yes", "Liar", "Yes", "type")
    ]


def test_patched_builtins_change_nothing_outside(sandbox: Sandbox) -> None:
    source = """
import builtins, json, operator
for name in ("isinstance", "type", "len", "repr", "str", "int", "print", "sorted"):
    setattr(builtins, name, lambda *a, **k: True)
operator.eq = json.dumps = json.loads = lambda *a, **k: True
def f(x): return 5
"""
    (outcome,) = run(sandbox, source)
    assert outcome.value in (True, 5, None)  # its own answer is all that it can spoil
    assert same_value(run(sandbox, "def f(x): return 5")[0].value, 5)


@pytest.mark.parametrize(
    "source",
    ["import os\ndef f(x):\n    while True:\n        try: os.fork()\n        except OSError: pass",
     "import os\ndef g():\n    while True:\n        try:\n            if os.fork() == 0: os.setsid(); g()\n"
     "        except OSError: pass\ng()\ndef f(x): return 1",
     "import threading\ndef f(x):\n    while True:\n        threading.Thread(target=f, args=(x,)).start()"],
    ids=["fork", "setsid", "threads"],
)  # fmt: skip
def test_bombs_do_not_go_off(sandbox: Sandbox, source: str) -> None:
    run(sandbox, SANE)  # the warm parent starts with the first call
    before = len(descendants())
    assert error_of(sandbox, source) in ("timeout", "RuntimeError: can't start new thread")
    assert len(descendants()) <= before


def descendants() -> set[int]:
    parent_of = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent_of[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {os.getpid()}
    while new := {pid for pid, parent in parent_of.items() if parent in found} - found:
        found |= new
    return found - {os.getpid()}


@pytest.mark.skipif(not may_change_user(), reason="refused: nothing would stop a fork bomb")
def test_processes_that_may_start_are_gone_afterwards() -> None:
    source = """
import os, time
def f(x):
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
    return 1
"""
    limits = Limits(processes=4000)
    for without in ((), ("namespaces",), ("namespaces", "filter")):
        with Sandbox(limits, without=without) as sandbox:
            run(sandbox, SANE)
            before = descendants()
            assert run(sandbox, source) == [Outcome(True, 1, "")]
            assert descendants() == before


def test_a_fake_result_gains_nothing(sandbox: Sandbox) -> None:
    source = """
import os, sys
def f(x):
    print('{"t":[true]}')
    for fd in range(256):
        for text in (b'5', b'V\\0\\0\\0\\0', b'E\\xff\\xff\\xff\\xff', b'[["value", "5"]]', b'\\0' * 64):
            try: os.write(fd, text)
            except OSError: pass
    return 5
"""
    for outcome in run(sandbox, source, 1, 2):
        assert outcome.error in ("garbled answer", "result too large")


def frame(kind: str, text: str) -> str:
    data = kind.encode() + len(text).to_bytes(4, "big") + text.encode("latin-1")
    return f"os.write(3, {data!r})"


@pytest.mark.parametrize(
    ("body", "error"),
    [(frame("V", "[[1"), "garbled answer"), (frame("V", '{"x":1}'), "garbled answer"),
     (frame("V", "[" * 60_000), "garbled answer"), (frame("V", "\x80"), "garbled answer"),
     (frame("Q", "1"), "garbled answer"), (frame("R", ""), "garbled answer"), (frame("E", ""), "error"),
     (frame("E", "two\nlines at 0xdeadbeef"), "two lines at 0x..."),
     ("os.write(3, b'V\\x7f\\xff\\xff\\xff')", "result too large"),
     ("os.write(3, b'V\\0\\0\\0\\x09half'); os._exit(0)", "garbled answer"),
     ("os.closerange(0, 100); time.sleep(60)", "garbled answer"),
     ("os.close(3)", "process exited")],
)  # fmt: skip
def test_a_forged_message_is_an_error(sandbox: Sandbox, body: str, error: str) -> None:
    assert error_of(sandbox, f"import os, time\ndef f(x):\n    {body}\n    return 1") == error


def test_a_forged_value_is_only_a_value(sandbox: Sandbox) -> None:
    source = f"import os\ndef f(x):\n    {frame('V', '6')}\n    return 1"
    assert run(sandbox, source) == [Outcome(True, 6, "")]


def test_more_answers_than_cases_are_cut(sandbox: Sandbox) -> None:
    source = f"import os\ndef f(x):\n    for _ in range(9): {frame('V', '6')}\n    return 1"
    assert run(sandbox, source, 1, 2) == [Outcome(True, 6, "")] * 2


def test_there_is_nothing_to_read(sandbox: Sandbox) -> None:
    source = """
import os
def f(path):
    if path == "environment": return dict(os.environ)
    if path == "here": return os.listdir(".")
    if path == "write":
        with open("note", "w") as file: file.write("x")
        with open("note") as file: return file.read()
    try:
        with open(path, "rb") as file: return len(file.read(10))
    except OSError as error: return type(error).__name__
"""
    secret = ["/etc/shadow", "/proc/1/environ", "/proc/self/environ", str(Path(__file__)), "../secret"]
    env, here, write, *read = [o.value for o in run(sandbox, source, "environment", "here", "write", *secret)]
    assert env == {}
    assert here == []
    if has_root(sandbox):
        assert write == "x"
        assert read == ["FileNotFoundError"] * len(secret)
    else:
        assert write is None
    assert run(sandbox, source, "here")[0].value == []


def has_root(sandbox: Sandbox) -> bool:
    """Whether an empty folder is the root of the file system; if not, nothing may be written."""
    (outcome,) = sandbox.call("import os\ndef f(): return os.path.exists('/proc')", "f", [()])
    return outcome.value is False


def test_files_are_small_and_few(sandbox: Sandbox) -> None:
    source = """
def f(x):
    if x == 1:
        with open("big", "wb") as file: file.write(b"x" * (2 << 20))
    return [open("small", "w") for _ in range(100)]
"""
    big, many = [o.error for o in run(sandbox, source, 1, 2)]
    if has_root(sandbox):
        assert big == "OSError: [Errno 27] File too large"
        assert many == "OSError: [Errno 24] Too many open files: 'small'"
    else:
        assert big == "PermissionError: [Errno 1] Operation not permitted: 'big'"


def test_killing_others_fails(sandbox: Sandbox) -> None:
    source = """
import os
def f(x):
    for pid in (os.getppid(), -1, 1, *range(2, 3000)):
        if pid != os.getpid():
            try: os.kill(pid, 9)
            except OSError: pass
    return 1
"""
    run(sandbox, source)
    parent = sandbox._parent  # pyright: ignore[reportPrivateUsage]
    assert parent
    assert parent.process.poll() is None


def test_no_network(sandbox: Sandbox) -> None:
    source = """
import ctypes
def f(address):
    libc = ctypes.CDLL(None)
    fd = libc.socket(2, 1, 0)
    if fd < 0: return "refused"
    raw = bytes([2, 0]) + (PORT).to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
    return libc.connect(fd, raw, 16)
"""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (outcome,) = run(sandbox, source.replace("PORT", str(port)))
    assert outcome.value in ("refused", -1)


@pytest.mark.skipif(os.getuid() != 0, reason="the limit on processes binds everybody but root")
def test_root_without_a_wall_against_fork_bombs_is_refused() -> None:
    with Sandbox(LIMITS, without=("user", "filter")) as sandbox:
        (outcome,) = sandbox.call(SANE, "f", [(1,)])
    assert outcome.error.startswith("confinement failed: the kernel's limit on processes does not bind root")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may write in; pytest's own stand below one that is closed to others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


def test_without_its_wall_an_attack_would_succeed(open_folder: Path) -> None:
    """The planted hole: the file that the filter, or the empty root, keeps from being written is written."""
    target = open_folder / "written"
    source = "def f(path):\n    with open(path, 'w') as file: file.write('x')\n    return 1"
    for without, is_written in (((), False), (("root",), False), (("root", "filter"), True)):
        if not may_change_user() and "filter" in without:
            continue
        with Sandbox(LIMITS, without=without) as sandbox:
            (outcome,) = sandbox.call(source, "f", [(str(target),)])
        assert (outcome.ok, target.exists()) == (is_written, is_written)


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


def test_a_killed_parent_is_replaced(sandbox: Sandbox) -> None:
    run(sandbox, SANE)
    for _ in range(2):
        parent = sandbox._parent  # pyright: ignore[reportPrivateUsage]
        assert parent
        os.kill(parent.process.pid, signal.SIGKILL)
        run(sandbox, SANE)


def test_nothing_is_left() -> None:
    before = descendants()
    sandbox = Sandbox(LIMITS)
    sandbox.call("while True: pass", "f", [()])
    parent = sandbox._parent  # pyright: ignore[reportPrivateUsage]
    assert parent
    assert descendants() > before
    del sandbox
    gc.collect()
    assert descendants() == before
    assert not Path(parent.base).exists()


def test_a_closed_sandbox_starts_again() -> None:
    sandbox = Sandbox(LIMITS)
    for _ in range(2):
        assert sandbox.call(SANE, "f", [(1,)])[0].value == 2
        sandbox.close()
        sandbox.close()


def test_a_forked_copy_has_a_parent_of_its_own() -> None:
    with Sandbox(LIMITS, cache_size=0) as sandbox:
        run(sandbox, SANE)
        pid = os.fork()
        if pid == 0:
            try:
                fine = sandbox.call(SANE, "f", [(5,)])[0].value == 6
                sandbox.close()
                os._exit(0 if fine else 1)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        run(sandbox, SANE)


def test_exit_without_close_is_silent() -> None:
    code = f"from agentrl.gym.sandbox import *; s = Sandbox(); print(s.call({SANE!r}, 'f', [(1,)])[0].value)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", code], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


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
    with pytest.raises(ValueError, match="cache_size"):
        Sandbox(cache_size=-1)


def cpu_seconds_of(num_runs: int) -> float:
    """CPU time of a sandbox's processes for so many runs of four cases, the start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Sandbox(LIMITS, cache_size=0) as sandbox:
        for _ in range(num_runs):
            sandbox.call(SANE, "f", [(1,), (2,), (3,), (4,)])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_run_takes_milliseconds() -> None:
    """In CPU time, which other load on the machine changes little."""
    assert (cpu_seconds_of(51) - cpu_seconds_of(1)) / 50 < 0.02
