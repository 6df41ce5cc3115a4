"""The spare: a child that is forked and confined before its job is known, and that no job ever meets."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gym.conftest import (
    LIMITS,
    SANE,
    at_rest,
    descendants,
    may_change_user,
    num_own,
    run,
)

from agentrl.gym.confine import SCRATCH_BYTES
from agentrl.gym.sandbox import Limits, Outcome, Sandbox


@pytest.fixture
def plain() -> Iterator[Sandbox]:
    with Sandbox(LIMITS, cache_size=0) as made:
        yield made


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}


def test_a_spare_is_confined_before_it_has_a_job(sandbox: Sandbox) -> None:
    run(sandbox, SANE)
    spare = at_rest(sandbox)[-1]
    found = status_of(spare)
    assert found["NoNewPrivs"] == "1"
    assert {found[name] for name in ("CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    without = sandbox._without  # pyright: ignore[reportPrivateUsage]
    if "filter" not in without:
        assert found["Seccomp"] == "2"
    if "user" not in without and os.getuid() == 0 and may_change_user():
        assert found["Uid"].split() == found["Gid"].split() == ["65534"] * 4
        assert found["Groups"] == ""
    assert "unlimited" not in limit_of(spare, "Max address space") + limit_of(spare, "Max cpu time")
    assert limit_of(spare, "Max processes").split()[:2] == ["1", "1"]


def limit_of(pid: int, name: str) -> str:
    (line,) = (x for x in Path(f"/proc/{pid}/limits").read_text().splitlines() if x.startswith(name))
    return line.removeprefix(name)


def test_each_call_has_a_child_of_its_own(plain: Sandbox) -> None:
    source = """
import builtins, json, sys
seen = (hasattr(builtins, "mark"), hasattr(json, "mark"), "mark" in sys.modules)
builtins.mark = json.mark = sys.modules["mark"] = 1
def f(x): return seen
"""
    spares: set[int] = set()
    for _ in range(3):
        assert plain.call(source, "f", [(1,)]) == [Outcome(True, (False,) * 3, "")]
        spares.add(at_rest(plain)[-1])
    assert len(spares) == 3


def test_no_spare_stands_beside_a_job(sandbox: Sandbox) -> None:
    """While a job runs, its own process is the only one that the warm parent has started."""
    most = num_own(sandbox)
    *rest, spare = at_rest(sandbox)
    source = "import time\ndef f(x):\n    time.sleep(0.5)\n    return x"
    thread = threading.Thread(target=sandbox.call, args=(source, "f", [(time.time(),)]))
    thread.start()
    seen: list[set[int]] = []
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        seen.append(descendants(rest[0]))
    thread.join()
    assert len(seen) > 1
    assert all(found == {*rest[1:], spare} and len(found) < most for found in seen)


def test_a_spare_for_other_limits_is_not_used(plain: Sandbox) -> None:
    source = "def f(x): return len('x' * (100 << 20))"
    for _ in range(3):
        for megabytes, outcome in (
            (64, Outcome(False, None, "memory limit")),
            (256, Outcome(True, 100 << 20, "")),
        ):
            plain.limits = Limits(memory_bytes=megabytes << 20)
            for _ in range(2):  # from a spare for the other limits, and from one for these
                assert plain.call(source, "f", [(1,)]) == [outcome]
                at_rest(plain)


def test_a_spare_has_time_for_about_as_many_cases(plain: Sandbox) -> None:
    seconds: list[int] = []
    for num_cases in (1, 8, 9, 16, 200, 2):
        cases = [(i,) for i in range(num_cases)]
        for _ in range(2):
            assert [o.value for o in plain.call("def f(x): return x", "f", cases)] == list(range(num_cases))
            seconds.append(int(limit_of(at_rest(plain)[-1], "Max cpu time").split()[0]))
            assert seconds[-1] >= LIMITS.cpu_seconds * (num_cases + 1)
    assert len({*seconds[:4], *seconds[-2:]}) == 1  # 1, 8 and 2 cases share a spare
    assert len(set(seconds[4:8])) == 1


def test_a_spare_that_died_costs_nothing(sandbox: Sandbox) -> None:
    run(sandbox, SANE)
    for _ in range(3):
        *rest, spare = at_rest(sandbox)
        os.kill(spare, signal.SIGKILL)
        while "Z" not in status_of(spare)["State"]:
            time.sleep(0.001)
        assert run(sandbox, "def f(x): return -x", 3, 4) == [Outcome(True, -3, ""), Outcome(True, -4, "")]
        assert at_rest(sandbox)[:-1] == rest


@pytest.mark.skipif(not may_change_user(), reason="refused: nothing would stop a fork bomb")
def test_calls_that_may_start_processes_have_a_spare_too() -> None:
    source = """
import os, random
def f(x):
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.write(write_end, repr(random.random()).encode())
        os._exit(0)
    return float(os.read(read_end, 100)) == random.random()
"""
    with Sandbox(Limits(processes=4000), cache_size=0) as sandbox:
        for _ in range(2):
            assert sandbox.call(source, "f", [(1,)]) == [Outcome(True, False, "")]  # its fork reseeds
            at_rest(sandbox)


def test_a_spare_ends_with_the_process_that_owns_it() -> None:
    code = (
        f"from agentrl.gym.sandbox import *; import sys; s = Sandbox(); s.call({SANE!r}, 'f', [(1,)]); "
        "print(s._parent.base, flush=True); sys.stdin.read()"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    owner = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout
        base = Path(owner.stdout.readline().strip())
        assert base.is_dir()
        left = descendants(owner.pid)
        assert left
        owner.kill()
    deadline = time.monotonic() + 20
    while (base.exists() or any(map(is_alive, left))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in left if is_alive(pid)]
    assert not base.exists()


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in status_of(pid)["State"]
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_spare_ends_with_the_warm_parent(sandbox: Sandbox) -> None:
    run(sandbox, SANE)
    found = at_rest(sandbox)
    os.kill(found[-2], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(map(is_alive, found)) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not any(map(is_alive, found))
    run(sandbox, SANE)


def test_what_a_run_writes_is_bounded_and_gone_afterwards(plain: Sandbox) -> None:
    source = """
def f(x):
    size = 1 << 20
    for i in range(x):
        try:
            with open(str(i), "wb", buffering=0) as file:
                if file.write(bytes(size)) < size: return i
        except OSError: return i
    return x
"""
    plain.limits = Limits(cpu_seconds=5.0)
    most = SCRATCH_BYTES >> 20
    for _ in range(2):
        (outcome,) = plain.call(source, "f", [(most + 1,)])
        if num_own(plain) == 3:  # it has namespaces, and so a file system of its own
            assert outcome.value == most  # the next one does not fit
        at_rest(plain)
