"""What one job says stays out of every later child: nothing in its frames, its memory or its descriptors."""

import faulthandler
import os
import signal
import struct
from pathlib import Path

import pytest
from tests.gym.conftest import SETTINGS, at_rest, may_change_user

from agentrl.gym.sandbox import Outcome, Sandbox
from agentrl.gym.unshared import SMALL, Unshared


def memory_of(pid: int) -> bytes:
    """All that a process can read; skips where this one may not look."""
    parts: list[bytes] = []
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                first, last = (int(end, 16) for end in line.split()[0].split("-"))
                if line.split()[1].startswith("rw"):
                    memory.seek(first)
                    parts.append(memory.read(last - first))
    except PermissionError:
        pytest.skip("another process's memory is not for this user")
    return b"".join(parts)


@pytest.mark.parametrize("without", SETTINGS.values(), ids=SETTINGS)
def test_no_child_has_the_memory_of_a_job_before_it(without: tuple[str, ...]) -> None:
    if without == ("filter",) and not may_change_user():
        pytest.skip("refused: nothing would stop a fork bomb")
    with Sandbox(cache_size=0, without=without) as sandbox:
        for size in (1, 3000, 200_000):
            source = f"secret_source = 1 {'#' * size}\ndef f(x): return [x[:9], 'secret_' + 'answer' * 3]"
            sandbox.call(source, "f", [("secret_argument" + "a" * size,), ("b",)])
            memory = memory_of(at_rest(sandbox)[-1])
            assert b"raise_around" in memory  # it did look
            for secret in (b"secret_source", b"secret_argument", b"secret_answer"):
                assert secret not in memory


def test_frames_hold_nothing_of_a_job_before() -> None:
    source = """
import sys
def f(x):
    texts, frame = [], sys._getframe().f_back.f_back.f_back
    while frame:
        texts.append(repr(frame.f_locals))
        frame = frame.f_back
    return "SECRET" in "".join(texts)
"""
    with Sandbox(cache_size=0) as sandbox:
        assert sandbox.call("def f(x): return x", "f", [("SECRET",)]) == [Outcome(True, "SECRET", "")]
        at_rest(sandbox)
        assert sandbox.call(source, "f", [(1,)]) == [Outcome(True, False, "")]


@pytest.mark.parametrize("without", SETTINGS.values(), ids=SETTINGS)
def test_flags_of_descriptors_do_not_outlive_a_job(without: tuple[str, ...]) -> None:
    if without == ("filter",) and not may_change_user():
        pytest.skip("refused: nothing would stop a fork bomb")
    source = """
import ctypes
fcntl = ctypes.CDLL(None).fcntl
def f(flags):
    before = [fcntl(fd, 3) for fd in range(4)]
    for fd in range(4): fcntl(fd, 4, flags)
    return before
"""
    with Sandbox(cache_size=0, without=without) as sandbox:
        answers = [sandbox.call(source, "f", [(flags,)]) for flags in (0o6000, 0, 0o6000, 0)]
    assert answers[0][0].ok
    assert answers == [answers[0]] * 4


def test_shared_memory_does_not_outlive_a_job() -> None:
    if not may_change_user():
        pytest.skip("refused: nothing would stop a fork bomb")
    source = "import ctypes\ndef f(flags): return ctypes.CDLL(None).shmget(77, 4096, flags)"
    with Sandbox(cache_size=0, without=("filter",)) as sandbox:
        if sandbox.call("import os\ndef f(): return os.getpid()", "f", [()])[0].value != 1:
            pytest.skip("the kernel gives no namespaces")
        assert sandbox.call(source, "f", [(0o1666,)])[0].value != -1
        assert sandbox.call(source, "f", [(0o666,)])[0].value == -1


def test_bytes_go_through_and_grow() -> None:
    memory = Unshared()
    read_end, write_end = os.pipe()
    for size in (1, SMALL - 1, SMALL, SMALL + 1, 5 * SMALL):
        data = os.urandom(size)
        memory.add(data)
        for num_left in range(size, 0, -1000):  # in parts that a pipe takes
            part = data[size - num_left : size - num_left + 1000]
            os.write(write_end, part)
            assert memory.read_exactly(read_end, len(part))
        memory.cut(0, size)
        assert memory.size == size
        assert memory.unpack(struct.Struct(f"{size}s"), 0) == (data,)
        memory.clear()
    os.close(write_end)
    assert not memory.read_exactly(read_end, 1)
    os.close(read_end)


@pytest.mark.parametrize("size", [10, 3 * SMALL])
def test_a_child_that_looks_crashes(size: int) -> None:
    memory = Unshared()
    memory.add(b"x" * size)
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # it would tell of a crash that is wanted
        memory.unpack(struct.Struct("10s"), size - 10)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV
    assert memory.unpack(struct.Struct("10s"), size - 10) == (b"x" * 10,)
