"""The warm parent: replaced when it dies, gone when its sandbox is, one for each process."""

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.gym.conftest import LIMITS, SANE, descendants, run

from agentrl.gym.sandbox import Limits, Sandbox


def test_a_killed_parent_is_replaced(sandbox: Sandbox) -> None:
    run(sandbox, SANE)
    for _ in range(2):
        parent = sandbox._parent  # pyright: ignore[reportPrivateUsage]
        assert parent
        os.kill(parent.process.pid, signal.SIGKILL)
        run(sandbox, SANE)


def test_nothing_is_left() -> None:
    sandbox = Sandbox(LIMITS)
    sandbox.call("while True: pass", "f", [()])
    parent = sandbox._parent  # pyright: ignore[reportPrivateUsage]
    assert parent
    before, own = set[int](), {parent.process.pid, *descendants(parent.process.pid)}
    while own != before:  # the child that had the job is still being buried, the next one made
        time.sleep(0.1)
        before, own = own, {parent.process.pid, *descendants(parent.process.pid)}
    assert own <= descendants()
    del sandbox
    gc.collect()
    assert not own & descendants()
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


def test_a_fork_runs_nothing_that_modules_left_for_it() -> None:
    code = """
import os
from agentrl.gym.server import PRELOADED, preload
hooks = preload()
import random, sys, threading
assert set(PRELOADED) <= set(sys.modules)
assert {hook["after_in_child"].__qualname__ for hook in hooks} >= {"Random.seed", "_after_fork"}
state = random.getstate()
pid = os.fork()
if pid == 0:
    os._exit(0 if random.getstate() == state else 1)
assert os.waitpid(pid, 0)[1] == 0
for hook in hooks:
    os.register_at_fork(**hook)
pid = os.fork()
if pid == 0:
    os._exit(0 if random.getstate() == state else 1)
assert os.waitpid(pid, 0)[1] != 0
"""
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    subprocess.run([sys.executable, "-S", "-c", code], env=env, check=True)


def run_alone(code: str) -> str:
    """What an interpreter of its own prints, with a sandbox imported."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    code = f"from agentrl.gym.sandbox import *\nSANE = {SANE!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_what_the_owner_ignores_or_blocks_changes_nothing() -> None:
    source = """
import signal
def f(x):
    ignored = [int(n) for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN]
    return ignored, len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""
    code = f"""
import signal
for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM, signal.SIGABRT):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
with Sandbox() as s: print(s.call({source!r}, "f", [(1,)])[0].value)
"""
    assert run_alone(code) == "([2, 13, 25], 0)"


def test_a_parent_that_cannot_start_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import os, sys, tempfile
tempfile.tempdir = {str(tmp_path)!r}
for sys.executable in ("/nowhere/python", "/bin/false"):
    try: Sandbox().call(SANE, "f", [(1,)])
    except OSError as error: print(error)
"""
    missing, failing = run_alone(code).splitlines()
    assert "/nowhere/python" in missing
    assert failing.startswith("the sandbox's warm parent process could not start: ")
    assert list(tmp_path.iterdir()) == []


def test_a_forked_copy_of_a_busy_sandbox_can_be_closed() -> None:
    with Sandbox(LIMITS) as sandbox:
        sandbox._lock.acquire()  # pyright: ignore[reportPrivateUsage]
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            sandbox.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        sandbox._lock.release()  # pyright: ignore[reportPrivateUsage]


def test_large_arguments_take_time_in_proportion() -> None:
    """In CPU time of the child: 32 MB, which quadratic reading would take half a minute for."""
    with Sandbox(Limits(cpu_seconds=10, memory_bytes=1 << 30), cache_size=0) as sandbox:
        cases = [("x" * 1_000_000,)] * 32
        assert [o.value for o in sandbox.call("def f(x): return len(x)", "f", cases)] == [1_000_000] * 32
