"""The warm parent of the sandbox: a small process that forks a confined child for each run.

`serve` is its main function. It reads requests from descriptor 0 and answers on descriptor 1, each with
its length in front. Jobs and answers pass through memory that no child inherits, unread.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import struct
import sys
from collections.abc import Collection
from typing import Any, NoReturn

from agentrl.gym import confine
from agentrl.gym.confine import Limits, Walls
from agentrl.gym.jail import Jail, remove_folder
from agentrl.gym.job import read_exactly
from agentrl.gym.unshared import Unshared

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

IGNORED = (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)  # the last two raise OSError instead

STARTED = b"+"  # written once, when requests will be answered
SIZE = struct.Struct(">Q")  # in front of all answers to a request
REQUEST = struct.Struct(">QII")  # bytes of the job, number of cases, bytes of the limits


def pack_request(limits: str, job: str, num_cases: int) -> bytes:
    """A request: the limits as a JSON object, the job as JSON [source, function, cases]; both ASCII."""
    return REQUEST.pack(len(job), num_cases, len(limits)) + limits.encode() + job.encode()


def preload() -> list[dict[str, Any]]:
    """Import PRELOADED, and return what these modules would have done at each fork instead of doing it.

    That is to seed `random` and to renew the locks of `threading`: half of the time of a fork, and nothing
    that the child of a parent without threads needs. (So this file imports neither by itself.)
    """
    hooks: list[dict[str, Any]] = []
    register = os.register_at_fork

    def keep(**hook: Any) -> None:
        hooks.append(hook)

    os.register_at_fork = keep
    try:
        for name in PRELOADED:
            importlib.import_module(name)
    finally:
        os.register_at_fork = register
    return hooks


@functools.lru_cache(maxsize=16)
def _limits(text: bytes) -> Limits:
    return Limits(**json.loads(text))


def serve(base: str, without: Collection[str] = ()) -> NoReturn:
    """Answer requests until their pipe ends, then remove the folder `base` and exit."""
    _reset_signals()
    isolated = "namespaces" not in without and confine.enter_namespaces()
    if isolated:
        # Namespaces of processes hold for children: the one that serves is the first of its own.
        pid = os.fork()
        if pid:
            os.closerange(0, 3)
            os.waitpid(pid, 0)
            remove_folder(base)  # what was mounted over it was not seen here
            os._exit(0)
        confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError):  # then the folder stays on the disk
            confine.mount_scratch(base)
    requests, answers = os.dup(0), os.dup(1)
    os.environ.clear()
    os.umask(0o077)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    confine.prctl(confine.PR_SET_DUMPABLE, 0)
    hooks = preload()
    sys.path.clear()
    sys.meta_path[:] = sys.meta_path[:2]  # built-in and frozen modules: the same everywhere
    sys.argv[:] = ["submission"]
    importlib.import_module("random").seed(0)  # every child starts from here
    jail = Jail(base, Walls(without), isolated, hooks)
    null = os.open(os.devnull, os.O_RDWR)  # until here, what fails is told on descriptor 2
    for fd in range(3):
        os.dup2(null, fd)
    gc.collect()
    gc.freeze()  # children do not copy the pages of what is loaded
    try:
        os.write(answers, STARTED)
        _answer(jail, requests, answers)
    finally:
        jail.close()
        remove_folder(base)
        os._exit(0)


def _answer(jail: Jail, requests: int, answers: int) -> None:
    """Answer request after request. This process is every child's origin: it must not read what they say."""
    text, frames = Unshared(), Unshared()
    while header := read_exactly(requests, REQUEST.size):
        size, num_cases, limits_size = REQUEST.unpack(header)
        limits = _limits(bytes(read_exactly(requests, limits_size)))
        if not text.read_exactly(requests, size):
            break
        jail.call(text, frames, num_cases, limits)
        frames.write(answers, SIZE.pack(frames.size))
        text.clear()
        frames.clear()
        jail.renew()


def _reset_signals() -> None:
    """Treat signals as a fresh interpreter does, whatever the owner ignores or blocks; Ctrl-C is for it."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in IGNORED else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
