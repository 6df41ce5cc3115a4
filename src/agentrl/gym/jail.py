"""The warm parent of the sandbox: a small process that forks a confined child for each run.

`serve` is its main function. It reads requests from descriptor 0 and answers on descriptor 1, each message
with its length in front. A child's answers are passed on unread: only frames and sizes are checked here.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import struct
import sys
import time
from collections.abc import Collection
from typing import Any, NoReturn

from agentrl.gym import confine
from agentrl.gym.confine import Limits, Walls
from agentrl.gym.plain import TOO_LARGE, decode, encode

# A child sees no file of the installation, so what it may import is loaded before it is forked.
PRELOADED = (
    "abc",
    "array",
    "bisect",
    "builtins",
    "cmath",
    "collections",
    "collections.abc",
    "contextlib",
    "copy",
    "ctypes",
    "dataclasses",
    "datetime",
    "decimal",
    "encodings.ascii",
    "encodings.latin_1",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "io",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "random",
    "re",
    "resource",
    "signal",
    "statistics",
    "string",
    "struct",
    "textwrap",
    "threading",
    "time",
    "types",
    "typing",
    "unicodedata",
)

HEADER = struct.Struct(">cI")  # a child's frame: kind, size of the text that follows
READY, VALUE, ERROR = b"R", b"V", b"E"
RESULT_FD = 3
MAX_ERROR = 200  # characters
POLL_SECONDS = 0.002  # the shortest wait between two looks at a child's CPU clock

# what an answer's first entry says; an unstable answer may differ next time and is not cached
Answer = tuple[str, str]
STABLE, UNSTABLE, RESULT = "error", "unstable", "value"


def read_message(fd: int) -> bytes:
    """One message from a pipe; b"" at its end."""
    size = _read_exactly(fd, 8)
    return _read_exactly(fd, int.from_bytes(size)) if size else b""


def write_message(fd: int, data: bytes) -> None:
    """Write one message to a pipe; BrokenPipeError when nobody reads."""
    view = memoryview(len(data).to_bytes(8) + data)
    while view:
        view = view[os.write(fd, view) :]


def _read_exactly(fd: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(fd, min(size - len(parts), 1 << 20))
        if not part:
            return b""
        parts += part
    return bytes(parts)


def one_line(text: str) -> str:
    """At most MAX_ERROR printable characters on one line, without addresses."""
    import re

    text = re.sub(r"0x[0-9a-fA-F]{6,}", "0x...", text[: 4 * MAX_ERROR])
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 3] + "..."


def describe(error: BaseException) -> str:
    """`Type: message` on one line; survives exceptions that cannot be printed."""
    if isinstance(error, MemoryError):
        return "memory limit"
    name = type(error).__name__
    try:
        is_syntax = isinstance(error, SyntaxError)
        message = f"{error.msg} (line {error.lineno})" if is_syntax else str(error)
    except BaseException:
        message = "(no message)"
    return one_line(f"{name}: {message}" if message else name)


def _send(kind: bytes, text: str) -> None:
    data = text.encode("ascii", "backslashreplace")
    view = memoryview(HEADER.pack(kind, len(data)) + data)
    while view:
        view = view[os.write(RESULT_FD, view) :]


def _run_child(source: str, function: str, arguments: list[str], limits: Limits) -> None:
    """In the child: load the source, then answer each case. Nothing here is relied upon by the parent."""
    max_bytes = limits.result_bytes
    namespace: dict[str, Any] = {"__name__": "submission"}
    try:
        exec(compile(source, "<submission>", "exec"), namespace)
        if not callable(namespace.get(function)):
            raise NameError(f"the source defines no function {function!r}")
    except BaseException as error:
        _send(ERROR, describe(error))
        return
    _send(READY, "")
    for text in arguments:
        try:
            args = decode(text)
            assert isinstance(args, tuple)
            result = namespace[function](*args)
        except BaseException as error:
            _send(ERROR, describe(error))
            continue
        try:
            answer = encode(result, max_bytes)
        except BaseException as error:
            _send(ERROR, one_line(str(error)) if type(error) is ValueError else describe(error))
        else:
            _send(VALUE, answer)


class Jail:
    """Runs calls in confined children, one after another; their scratch folders come and go in `base`."""

    def __init__(self, base: str, walls: Walls, own_namespaces: bool) -> None:
        self._base = base
        self._namespaces = confine.ProcessNamespaces() if own_namespaces else None
        self._walls = walls
        self._num_runs = 0

    def call(self, source: str, function: str, arguments: list[str], limits: Limits) -> list[Answer]:
        """One answer a case; a case that ends its child costs the later ones only a new child."""
        answers: list[Answer] = []
        num_timeouts = 0
        while len(answers) < len(arguments):
            if num_timeouts >= limits.timeouts:
                skipped = (answers[-1][0], "not run after too many timeouts")
                return answers + [skipped] * (len(arguments) - len(answers))
            rest = arguments[len(answers) :]
            loaded, got = self._run(source, function, rest, limits)
            if not loaded:  # the same would happen to every case
                return answers + got * len(rest)
            answers += got
            num_timeouts += got[-1][1] == "timeout" and got[-1][0] != RESULT
        return answers

    def _run(
        self, source: str, function: str, arguments: list[str], limits: Limits
    ) -> tuple[bool, list[Answer]]:
        """Whether the source loaded, and the answers up to the first case that ended the child."""
        self._num_runs += 1
        scratch = f"{self._base}/{self._num_runs}"
        os.mkdir(scratch, 0o700)
        if self._walls.changes_user:
            with contextlib.suppress(OSError):
                os.chown(scratch, confine.NOBODY, confine.NOBODY)
        if self._namespaces:
            self._namespaces.renew()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._be_child(scratch, write_end, source, function, arguments, limits)
        os.close(write_end)
        try:
            return self._watch(pid, read_end, len(arguments), limits)
        finally:
            os.close(read_end)
            self._end(pid)
            shutil.rmtree(scratch, ignore_errors=True)

    def _be_child(
        self, scratch: str, write_end: int, source: str, function: str, arguments: list[str], limits: Limits
    ) -> NoReturn:
        try:
            os.setsid()
            os.chdir(scratch)
            if write_end != RESULT_FD:
                os.dup2(write_end, RESULT_FD)
            os.closerange(RESULT_FD + 1, os.sysconf("SC_OPEN_MAX") if sys.platform != "linux" else 256)
            sys.path.clear()
            sys.meta_path[:] = sys.meta_path[:2]  # built-in and frozen modules: the same everywhere
            sys.argv[:] = ["submission"]
            random.seed(0)
            self._walls.raise_around(limits, len(arguments))
            _run_child(source, function, arguments, limits)
        except BaseException as error:
            with contextlib.suppress(BaseException):
                _send(ERROR, one_line(f"confinement failed: {error}"))
        finally:
            os._exit(0)

    def _watch(self, pid: int, fd: int, num_cases: int, limits: Limits) -> tuple[bool, list[Answer]]:
        clock = (~pid << 3) | 2  # the CPU clock of process pid: clock_getcpuclockid(3)
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        buffer = bytearray()
        answers: list[Answer] = []
        loaded = False
        cpu_end, wall_end = limits.cpu_seconds, time.monotonic() + limits.wall_seconds

        def end(kind: str, text: str) -> tuple[bool, list[Answer]]:
            return loaded, [*answers, (kind, text)]

        while True:
            cpu = time.clock_gettime(
                clock
            )  # a process that ended, but was not waited for, still has its clock
            wall = time.monotonic()
            progressed = False
            while len(buffer) >= HEADER.size:
                kind, size = HEADER.unpack_from(buffer)
                if size > max(limits.result_bytes, 4 * MAX_ERROR):
                    return end(STABLE, TOO_LARGE)
                if len(buffer) < HEADER.size + size:
                    break
                text = buffer[HEADER.size : HEADER.size + size].decode("ascii", "replace")
                del buffer[: HEADER.size + size]
                if kind not in (VALUE, ERROR) if loaded else kind not in (READY, ERROR):
                    return end(STABLE, "garbled answer")
                if not loaded and kind == ERROR:
                    return end(STABLE, text)
                progressed = True
                if loaded:
                    answers.append((RESULT if kind == VALUE else STABLE, text))
                    if len(answers) == num_cases:
                        return True, answers
                loaded = True
            if progressed:
                cpu_end, wall_end = cpu + limits.cpu_seconds, wall + limits.wall_seconds
            elif cpu >= cpu_end:
                return end(STABLE, "timeout")
            elif wall >= wall_end:
                return end(UNSTABLE, "timeout")
            wait = min(wall_end - wall, max(cpu_end - cpu, POLL_SECONDS))
            if poller.poll(1 + wait * 1000):
                part = os.read(fd, 1 << 16)
                if not part:
                    return end(*self._how_it_ended(pid, bool(buffer)))
                buffer += part

    def _how_it_ended(self, pid: int, in_frame: bool) -> Answer:
        """A child that closed its pipe without an answer: it ended, or will be ended."""
        deadline = time.monotonic() + 0.5  # a crash on a busy machine takes a while to be reaped
        while time.monotonic() < deadline:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if status is None:
                time.sleep(0.001)
            elif status.si_code == os.CLD_EXITED:
                return STABLE, "garbled answer" if in_frame else "process exited"
            elif status.si_status == signal.SIGKILL:
                return UNSTABLE, "process killed"
            else:
                return STABLE, f"process crashed ({signal.Signals(status.si_status).name})"
        return STABLE, "garbled answer"

    def _end(self, pid: int) -> None:
        """Kill the child and whatever it left behind; returns when nothing is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while not self._namespaces:  # orphans come to this process, their reaper
            try:
                left, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if left == 0:
                for orphan in _children():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(orphan, signal.SIGKILL)
                time.sleep(0.0005)


def _children() -> list[int]:
    """Direct children of this process, by looking at every process's parent."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


def serve(base: str, without: Collection[str] = ()) -> NoReturn:
    """Answer requests until their pipe ends, then remove the folder `base` and exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    isolated = "namespaces" not in without and confine.enter_namespaces()
    if isolated:
        # Namespaces of processes hold for children: the one that serves is the first of its own.
        pid = os.fork()
        if pid:
            os.closerange(0, 3)
            os.waitpid(pid, 0)
            os._exit(0)
        confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.environ.clear()
    os.umask(0o077)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    confine.prctl(confine.PR_SET_DUMPABLE, 0)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children do not copy the pages of what is loaded
    jail = Jail(base, Walls(without), isolated)
    try:
        while request := read_message(requests):
            source, function, arguments, limits = json.loads(request)
            found = jail.call(source, function, arguments, Limits(**limits))
            write_message(answers, json.dumps(found).encode())
    finally:
        shutil.rmtree(base, ignore_errors=True)
        os._exit(0)
