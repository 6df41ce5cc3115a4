"""Code that nobody trusts gains nothing and breaks nothing, with namespaces and without."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gym.conftest import (
    LIMITS,
    SANE,
    at_rest,
    descendants,
    error_of,
    has_root,
    may_change_user,
    num_own,
    run,
    warm_parent,
)

from agentrl.gym.confine import SCRATCH_FILES
from agentrl.gym.sandbox import Limits, Outcome, Sandbox, same_value


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
    assert error_of(sandbox, source) in ("timeout", "RuntimeError: can't start new thread")
    at_rest(sandbox)


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
            most = num_own(sandbox)
            assert sandbox.call(source, "f", [(1,)]) == [Outcome(True, 1, "")]
            assert len(descendants(warm_parent(sandbox))) < most  # at once
            at_rest(sandbox)


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
    if path == "here":
        try: return os.listdir(".")
        except PermissionError: return []
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
        assert read == ["PermissionError"] * len(secret)
    assert run(sandbox, source, "here")[0].value == []


def test_nothing_is_open_but_the_way_out(sandbox: Sandbox) -> None:
    source = """
import os
def f(x):
    found = []
    for fd in range(1024):
        try: os.fstat(fd)
        except OSError: continue
        found.append(fd)
    try: return found, os.read(3, 1)
    except OSError as error: return found, error.errno
"""
    (outcome,) = run(sandbox, source)
    assert outcome.value == ([0, 1, 2, 3], 9)  # nothing, and the pipe that takes answers; EBADF


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
    run(sandbox, SANE)
    before = at_rest(sandbox)
    run(sandbox, source)
    assert at_rest(sandbox)[:-1] == before[:-1]


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


@pytest.mark.skipif(not may_change_user(), reason="refused: nothing would stop a fork bomb")
def test_a_signal_without_a_name_is_a_crash_like_others() -> None:
    with Sandbox(LIMITS, without=("namespaces", "filter")) as sandbox:
        error = error_of(sandbox, "import os\ndef f(x): os.kill(os.getpid(), 40)")
    assert error == "process crashed (signal 40)"


def test_an_exception_whose_type_has_no_name_is_an_error(sandbox: Sandbox) -> None:
    source = """
class Meta(type):
    @property
    def __name__(cls): raise SystemExit
class Odd(Exception, metaclass=Meta): pass
def f(x):
    if x == 1: raise Odd
    return x
"""
    assert [o.value or o.error for o in run(sandbox, source, 1, 2)] == ["exception: (no message)", 2]


@pytest.mark.skipif(not may_change_user(), reason="refused: nothing would stop a fork bomb")
def test_folders_of_any_depth_and_mode_are_removed() -> None:
    source = """
import os
def f(x):
    for _ in range(x):
        os.mkdir("d")
        os.mkdir("shut", 0)
        os.symlink("/", "link")
        os.chdir("d")
"""
    for without in (("filter",), ("namespaces", "filter")):
        with Sandbox(Limits(cpu_seconds=5), cache_size=0, without=without) as sandbox:
            sandbox.call(source, "f", [(1200,)])
            parent = warm_parent(sandbox)
            run(sandbox, SANE)
            assert warm_parent(sandbox) == parent
            own = sandbox._parent  # pyright: ignore[reportPrivateUsage]
            assert own
            at_rest(sandbox)
            assert len(list(Path(own.base).iterdir())) <= 1  # the spare's
        assert not Path(own.base).exists()


def test_files_are_few() -> None:
    source = """
def f(x):
    for i in range(x):
        try: open(str(i), "w").close()
        except OSError: return i
    return x
"""
    with Sandbox(Limits(cpu_seconds=5)) as sandbox:
        (outcome,) = sandbox.call(source, "f", [(2 * SCRATCH_FILES,)])
        if num_own(sandbox) == 3:  # it has namespaces, and so a file system of its own
            assert isinstance(outcome.value, int)
            assert SCRATCH_FILES / 2 < outcome.value < SCRATCH_FILES
