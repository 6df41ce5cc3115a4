"""The sandbox: calls functions that nobody trusts in children of a warm parent, and caches by content."""

import functools
import hashlib
import json
import os
import select
import shutil
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
from typing import Any, Self, cast

from agentrl.gym.confine import WALLS, Limits
from agentrl.gym.job import one_line
from agentrl.gym.plain import decode, encode, same_value
from agentrl.gym.server import SIZE, pack_request, write_message
from agentrl.gym.watch import RESULT, UNSTABLE, Answer

__all__ = ["Limits", "Outcome", "Sandbox", "same_value"]

STOPPED = "sandbox stopped"


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
        # A hash seed of its own makes the order of sets, and so what functions return, repeatable.
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-B", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0"},
            cwd="/",
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )

    def exchange(self, request: bytes, seconds: float) -> bytes:
        """The answer to a request, or b"" when the process died or gave none in that time."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        deadline = time.monotonic() + seconds
        try:
            write_message(stdin.fileno(), request)
        except BrokenPipeError:
            return b""
        poller = select.poll()
        poller.register(stdout, select.POLLIN)
        buffer = bytearray()
        while len(buffer) < SIZE.size or len(buffer) < SIZE.size + SIZE.unpack_from(buffer)[0]:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return b""
            part = os.read(stdout.fileno(), 1 << 16)  # more would be mapped anew each time
            if not part:
                return b""
            buffer += part
        return bytes(buffer[SIZE.size :])

    def close(self) -> None:
        """End the process and remove its folder; in a forked copy only let go of the pipes."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        if self.owner != os.getpid():
            self.process.returncode = 0  # not our child: nothing to wait for
            return
        try:
            self.process.wait(timeout=0.5)  # the end of its pipe ends it
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.base, ignore_errors=True)


class Sandbox:
    """Runs functions that nobody trusts, with limits, and returns what they return as plain data.

    One warm parent (a small interpreter without torch) forks a confined child a call, before the call: it
    waits for its job, does that one and ends. The child gets the source, the function's name and the
    arguments, nothing else. It can write any message that it likes into
    the pipe of results; that gains nothing, because expected values never enter it: the caller compares, with
    `same_value`, plain data that was decoded here. A message that is garbled, cut short or too large is an
    error outcome. Each process that uses a sandbox gets a parent of its own, also after a fork; a parent that
    died is replaced.

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
        plain data.
        """
        if not arguments:
            return []
        cases = [encode(self._checked(args)) for args in arguments]
        job = json.dumps([source, function, cases])
        request = pack_request(_as_json(self.limits), job, len(cases))
        if self._owner != os.getpid():  # forked: the parent, and perhaps the lock, belong to somebody else
            self._lock, self._owner = threading.Lock(), os.getpid()
        with self._lock:
            answers = self._answers(request, len(cases))
        return [self._outcome(*answer) for answer in answers]

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
        if all(kind != UNSTABLE for kind, _ in answers):
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
                answers = [(str(kind), str(text)) for kind, text in json.loads(reply)]
        except (ValueError, TypeError):  # not an answer: the parent is not to be trusted any more
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
    def _outcome(kind: str, text: str) -> Outcome:
        if kind != RESULT:
            return Outcome(False, None, one_line(text) or "error")
        try:
            return Outcome(True, decode(text), "")
        except ValueError:
            return Outcome(False, None, "garbled answer")

    def close(self) -> None:
        """End the warm parent; a later call starts a new one. Also done when the interpreter exits."""
        with self._lock:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
