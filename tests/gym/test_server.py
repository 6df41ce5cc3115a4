"""The warm parent: replaced when it dies, gone when its sandbox is, one for each process."""

import gc
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from tests.gym.conftest import LIMITS, SANE, descendants, run

from agentrl.gym.sandbox import Sandbox


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
