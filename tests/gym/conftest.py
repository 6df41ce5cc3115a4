"""Sandboxes with all walls and with some, and looks at the processes that belong to one."""

import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.gym.sandbox import Limits, Outcome, Sandbox

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


def has_root(sandbox: Sandbox) -> bool:
    """Whether an empty folder is the root of the file system; if not, nothing may be opened."""
    (outcome,) = sandbox.call("import os\ndef f(): return os.path.exists('/proc')", "f", [()])
    return outcome.value is False


def descendants(pid: int | None = None) -> set[int]:
    """The processes that a process, by default this one, started, and that those started."""
    top = pid or os.getpid()
    parent_of = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent_of[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {top}
    while new := {pid for pid, parent in parent_of.items() if parent in found} - found:
        found |= new
    return found - {top}


def warm_parent(sandbox: Sandbox) -> int:
    """The process that the sandbox started, and that starts all the others."""
    parent = sandbox._parent  # pyright: ignore[reportPrivateUsage]
    assert parent
    assert parent.process.poll() is None
    return parent.process.pid


@functools.cache
def _num_own(without: tuple[str, ...]) -> int:
    with Sandbox(without=without) as sandbox:
        (outcome,) = sandbox.call("import os\ndef f(): return os.getpid()", "f", [()])
    return 3 if outcome.value == 1 else 2


def num_own(sandbox: Sandbox) -> int:
    """How many processes a sandbox at rest has: its warm parent, a spare, in namespaces one around them."""
    return _num_own(sandbox._without)  # pyright: ignore[reportPrivateUsage]


def at_rest(sandbox: Sandbox) -> list[int]:
    """The processes of a sandbox, the spare last, when nothing but those of a sandbox at rest is left."""
    wanted, outer = num_own(sandbox), warm_parent(sandbox)
    deadline, found = time.monotonic() + 20, [outer]
    while time.monotonic() < deadline:
        found = [outer, *sorted(descendants(outer))]
        if len(found) == wanted and is_waiting(found[-1]):
            return found
        time.sleep(0.005)
    raise AssertionError(f"{wanted} processes should be left, not {found}")


def is_waiting(pid: int) -> bool:
    """Whether a spare has confined itself as far as it will."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tS" in status and "CapEff:\t0000000000000000" in status
