"""The sandbox: calls functions that nobody trusts in children of a warm parent, and caches by content."""

import functools
import hashlib
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from agentrl.gym.confine import WALLS, Limits
from agentrl.gym.jail import remove_folder
from agentrl.gym.job import VALUE, one_line, write_all
from agentrl.gym.plain import decode, encode, same_value
from agentrl.gym.server import SIZE, STARTED, pack_request
from agentrl.gym.watch import UNSTABLE, parse_answers

__all__ = ["Limits", "Outcome", "Sandbox", "same_value"]

STOPPED = "sandbox stopped"
START_SECONDS = 60.0
MOST_POLL_SECONDS = 10**6
MOST_CACHED = 1 << 14  # characters of a call's answers: there may be thousands of those

Answer = tuple[bytes, str]  # its kind (VALUE, ERROR or UNSTABLE) and what it says


@functools.lru_cache(maxsize=16)
def _as_json(limits: Limits) -> str:
    return json.dumps(asdict(limits))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call returned: exactly one of value and error."""

    ok: bool
    value: object  # plain data: None, bool, int, float, str; tuple, list, dict, set of such; None on an error
    error: (
        str  # one line, such as "ZeroDivisionError: division by zero", "timeout", "memory limit"; "" when ok
    )


class _Reader:
    """Reads what a process says, as it comes, until a deadline (seconds of time.monotonic)."""

    def __init__(self, pipe: IO[bytes], deadline: float) -> None:
        self._fd = pipe.fileno()
        self._deadline = deadline
        self._poller = select.poll()
        self._poller.register(self._fd, select.POLLIN)
        self._buffer = bytearray()

    def read_until(self, size: int) -> bytes:
        """The next so many bytes; b"" where the pipe ends, or time runs out, before."""
        while len(self._buffer) < size:
            seconds = min(max(0.0, self._deadline - time.monotonic()), MOST_POLL_SECONDS)
            if not self._poller.poll(seconds * 1000):
                return b""
            part = os.read(self._fd, 1 << 16)  # more would be mapped anew each time
            if not part:
                return b""
            self._buffer += part
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


class _Parent:
    """The warm parent process and the pipes to it."""

    def __init__(self, without: Collection[str]) -> None:
        self.owner = os.getpid()
        self.base = tempfile.mkdtemp(prefix="agentrl-sandbox-")
        os.chmod(self.base, 0o711)  # the confined user passes through to its own scratch folder
        root = str(Path(__file__).parents[2])
        code = (
            f"import sys; sys.path.append({root!r}); from agentrl.gym.server import serve; "
            f"sys.path.pop(); serve({self.base!r}, {tuple(without)!r})"
        )
        try:
            # A hash seed of its own makes the order of sets, and so what functions return, repeatable.
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,  # only until it has started
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                bufsize=0,
                start_new_session=True,  # Ctrl-C in the terminal is not for it
            )
        except BaseException:
            remove_folder(self.base)
            raise
        try:
            self._wait_until_started()
        except BaseException:
            self.close()
            raise

    def _wait_until_started(self) -> None:
        """Raises OSError if the process cannot start: that is no fault of any function to be called."""
        _, stdout, stderr = self._pipes()
        answers = _Reader(stdout, time.monotonic() + START_SECONDS)
        if answers.read_until(len(STARTED)) != STARTED:
            self.process.kill()
            lines = stderr.read().decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else f"it did not within {START_SECONDS:.0f} s"
            raise OSError(f"the sandbox's warm parent process could not start: {why}")
        stderr.close()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        return process.stdin, process.stdout, process.stderr

    def exchange(self, request: bytes, seconds: float) -> bytes:
        """The answer to a request, or b"" when the process died or gave none in that time."""
        stdin, stdout, _ = self._pipes()
        answers = _Reader(stdout, time.monotonic() + seconds)
        try:
            write_all(stdin.fileno(), request)
        except BrokenPipeError:
            return b""
        head = answers.read_until(SIZE.size)
        return answers.read_until(*SIZE.unpack(head)) if head else b""

    def close(self) -> None:
        """End the process and remove its folder; in a forked copy only let go of the pipes."""
        for pipe in self._pipes():
            pipe.close()
        if self.owner != os.getpid():
            self.process.returncode = 0  # not our child: nothing to wait for
            return
        try:
            self.process.wait(timeout=0.5)  # the end of its pipe ends it
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        remove_folder(self.base)


class Sandbox:
    """Runs functions that nobody trusts, with limits, and returns what they return as plain data.

    One warm parent (a small interpreter without torch) forks a confined child a call, before the call: it
    waits for its job, does that one and ends. The child gets the source, the function's name and the
    arguments, nothing else. It can write any message that it likes into the pipe of results; that gains
    nothing, because expected values never enter it: the caller compares, with `same_value`, plain data that
    was decoded here. A message that is garbled, cut short or too large is an error outcome. What passes
    through the parent lies in memory that no child inherits, so that no run sees another's. Each process that
    uses a sandbox gets a parent of its own, also after a fork; a parent that died is replaced.

    Limits on resources always hold. Where the kernel allows them there are four walls more: namespaces
    (processes, network), an empty root folder, another user, a filter of system calls; `without` leaves some
    out, to test the others.

    >>> with Sandbox() as sandbox:
    ...     for outcome in sandbox.call("def half(x): return 1 / x", "half", [(2,), (0,)]):
    ...         print(outcome)
    Outcome(ok=True, value=0.5, error='')
    Outcome(ok=False, value=None, error='ZeroDivisionError: division by zero')
    """

    def __init__(
        self, limits: Limits | None = None, cache_size: int = 16_384, *, without: Collection[str] = ()
    ) -> None:
        if cache_size < 0:
            raise ValueError(f"cache_size must not be negative, got {cache_size}")
        if unknown := set(without) - set(WALLS):
            raise ValueError(f"without must name some of {WALLS}, got {sorted(unknown)}")
        self.limits = limits or Limits()
        self.num_runs = 0  # calls that were not answered from the cache
        self._cache_size = cache_size
        self._cache: OrderedDict[bytes, list[Answer]] = OrderedDict()
        self._without = tuple(without)
        self._parent: _Parent | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def call(self, source: str, function: str, arguments: Sequence[tuple[object, ...]]) -> list[Outcome]:
        """Load the source once in a child, then call `function(*args)` for each args: one Outcome each.

        Each case decodes its own arguments, so that one may change them. A case that hangs or ends its child
        costs the later ones nothing, up to `limits.timeouts`. Raises ValueError for arguments that are not
        plain data, and OSError where the warm parent cannot start.
        """
        if not arguments:
            return []
        cases = [encode(self._checked(args)) for args in arguments]
        job = json.dumps([source, function, cases])
        request = pack_request(_as_json(self.limits), job, len(cases))
        with self._own_lock():
            answers = self._answers(request, len(cases))
        return [self._outcome(*answer) for answer in answers]

    def _own_lock(self) -> threading.Lock:
        if self._owner != os.getpid():  # forked: perhaps another thread held it, and none is left to let go
            self._lock, self._owner = threading.Lock(), os.getpid()
        return self._lock

    @staticmethod
    def _checked(args: object) -> tuple[object, ...]:
        if type(args) is not tuple:
            raise ValueError(f"each case's arguments must be a tuple, got {type(args).__name__}")
        return cast("tuple[object, ...]", args)

    def _answers(self, request: bytes, num_cases: int) -> list[Answer]:
        key = hashlib.blake2b(request, digest_size=16).digest()
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        self.num_runs += 1
        answers = self._run(request, num_cases) or self._run(
            request, num_cases
        )  # once more if its parent died
        if not answers:
            return [(UNSTABLE, STOPPED)] * num_cases
        is_stable = all(kind != UNSTABLE for kind, _ in answers)
        if is_stable and sum(len(text) for _, text in answers) <= MOST_CACHED:
            self._cache[key] = answers
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return answers

    def _run(self, request: bytes, num_cases: int) -> list[Answer]:
        """The answers of the warm parent; none when it died, and then it is gone."""
        seconds = 30.0 + self.limits.wall_seconds * (num_cases + 1)
        parent = self._warm_parent()
        answers: list[Answer] = []
        try:
            reply = parent.exchange(request, seconds)
            if reply:
                answers = parse_answers(reply, num_cases)
        except (ValueError, struct.error):  # not an answer: the parent is not to be trusted any more
            answers = []
        finally:
            if len(answers) != num_cases:
                self._stop()
        return answers if len(answers) == num_cases else []

    def _warm_parent(self) -> _Parent:
        if self._parent and (self._parent.owner != os.getpid() or self._parent.process.poll() is not None):
            self._stop()
        if self._parent is None:
            self._parent = _Parent(self._without)
            self._finalizer = weakref.finalize(self, self._parent.close)
        return self._parent

    def _stop(self) -> None:
        if self._finalizer:
            self._finalizer()
        self._parent = self._finalizer = None

    @staticmethod
    def _outcome(kind: bytes, text: str) -> Outcome:
        if kind != VALUE:
            return Outcome(False, None, one_line(text) or "error")
        try:
            return Outcome(True, decode(text), "")
        except ValueError:
            return Outcome(False, None, "garbled answer")

    def close(self) -> None:
        """End the warm parent; a later call starts a new one. Also done when the interpreter exits."""
        with self._own_lock():
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
