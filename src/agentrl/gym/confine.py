"""Confinement: everything that a process gives up before it runs code that nobody trusts."""

import contextlib
import ctypes
import functools
import math
import os
import resource
import signal
import struct
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from agentrl.gym.system_calls import SystemCallFilter

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
NOBODY = 65534
CAPABILITY_VERSION_3 = 0x20080522
SCRATCH_BYTES = 64 << 20  # all files of a run together, where its folder is in memory
SCRATCH_FILES = 4096  # likewise, folders included
LEAST_FILES = 4  # open when a job starts
MOST_SECONDS, MOST_BYTES = 10**6, 1 << 62  # that the kernel's interfaces can tell
WALLS = ("namespaces", "root", "user", "filter")  # limits on resources always hold

_libc = ctypes.CDLL(None, use_errno=True)
_prctl, _capset = _libc.prctl, _libc.capset
_NO_CAPABILITIES = (struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24))  # this process, three empty sets


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one call may use. CPU time decides first, so that a busy machine gives the same answers.

    >>> Limits(cpu_seconds=0.1).wall_seconds
    5.0
    """

    cpu_seconds: float = 0.25  # for loading the source, and again for each case
    wall_seconds: float = 5.0  # likewise; generous: it only stops code that waits
    memory_bytes: int = 256 << 20  # address space beyond the empty interpreter's
    processes: int = 1  # of the same user; 1: the child can start neither a process nor a thread
    file_bytes: int = 1 << 20  # size of one file
    open_files: int = 16  # descriptors, the four that the process starts with included
    result_bytes: int = 1 << 16  # encoded size of what one case returns
    timeouts: int = 2  # of one call; the cases after the last one are not run

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = LEAST_FILES if field.name == "open_files" else 0
            most = MOST_SECONDS if field.type is float else MOST_BYTES
            if not (type(value) in {int, field.type} and 0 < value <= most and value >= least):
                kind = "seconds" if field.type is float else "a whole number"
                above = f"at least {least}" if least else "positive"
                raise ValueError(f"{field.name} must be {kind}, {above} and at most {most}, got {value!r}")


def _call(function: Any, *args: int | bytes | None) -> None:
    if function(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function.__name__}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Leave the namespaces in `flags`; OSError where the kernel refuses."""
    _call(_libc.unshare, flags)


def prctl(option: int, value: int) -> None:
    """Set one of the process's attributes; OSError where the kernel refuses."""
    _call(_prctl, option, value, 0, 0, 0)


def enter_namespaces() -> bool:
    """Leave the network, IPC and (for children) process namespaces; False where the kernel refuses.

    Root does so directly; anybody else through a user namespace in which only their own id exists. A child
    tries first, since a process that got only half of the way could not go back.
    """
    flags = CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID
    for chosen in (flags, flags | CLONE_NEWUSER):
        pid = os.fork()
        if pid == 0:
            try:
                _enter(chosen)
            except OSError:
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:
            _enter(chosen)
            return True
    return False


def _enter(flags: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    unshare(flags)
    if flags & CLONE_NEWUSER:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def mount_scratch(folder: str) -> None:
    """Put a file system in memory over a folder, for this process and its children; OSError where refused.

    It takes a tenth of the time of a disk's to make a folder and remove it, and it cannot fill the disk.
    """
    unshare(CLONE_NEWNS)
    _call(_libc.mount, None, b"/", None, MS_REC | MS_PRIVATE, None)  # or others would see it
    options = f"mode=0711,size={SCRATCH_BYTES},nr_inodes={SCRATCH_FILES}".encode()
    _call(_libc.mount, b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)


class ProcessNamespaces:
    """Gives each next child a process namespace of its own: when its first process dies, all in it die.

    The kernel lets a process choose its children's namespace only once; going back to its own in between
    resets that.
    """

    def __init__(self) -> None:
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def renew(self) -> None:
        """The next child is the first process of a new namespace; OSError where the kernel refuses."""
        _call(_libc.setns, self._own, CLONE_NEWPID)
        unshare(CLONE_NEWPID)


def drop_capabilities() -> None:
    """Give up every capability, in a user namespace too."""
    _call(_capset, *_NO_CAPABILITIES)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a child sets on itself before it knows its job: worked out before it is forked."""

    resources: tuple[tuple[int, tuple[int, int]], ...]  # arguments of setrlimit: kind, (soft, hard)
    may_start: bool  # processes and threads


class Walls:
    """The walls around a child, all that the kernel grants; `without` names some of WALLS to leave out.

    Made by the process that will fork the children: they inherit that it gains no new privileges.
    """

    def __init__(self, without: Collection[str] = ()) -> None:
        self._has_root_wall = "root" not in without
        found = SystemCallFilter()
        self._filter = found if "filter" not in without and found.is_supported else None
        self.changes_user = os.getuid() == 0 and "user" not in without
        with open("/proc/self/statm") as file:
            self._base_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        self.bounds = functools.lru_cache(maxsize=64)(self._bounds)

    def _bounds(self, limits: Limits, num_cases: int) -> Bounds:
        """The bounds that `limits` set to a call of so many cases, or of somewhat more."""
        most_cases = 1 << max(3, (num_cases - 1).bit_length())  # few kinds of bounds, so that they recur
        resources: list[tuple[int, tuple[int, int]]] = []
        for kind, amount in (
            (resource.RLIMIT_CORE, 0),
            # the warm parent, finer, comes first
            (resource.RLIMIT_CPU, math.ceil(limits.cpu_seconds * (most_cases + 1)) + 1),
            (resource.RLIMIT_AS, self._base_bytes + limits.memory_bytes),
            (resource.RLIMIT_NPROC, limits.processes),
            (resource.RLIMIT_FSIZE, limits.file_bytes),
            (resource.RLIMIT_NOFILE, limits.open_files),
        ):
            _, hard = resource.getrlimit(kind)
            amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
            resources.append((kind, (amount, amount)))
        return Bounds(tuple(resources), limits.processes > 1)

    def raise_around(self, bounds: Bounds) -> None:
        """Confine this process, in the order that lets each step still happen.

        The working directory becomes the root of the file system where the kernel allows it; where it does
        not, the filter of system calls lets no file be opened. Raises OSError when a step fails that never
        should, and where nothing would stop a fork bomb.
        """
        if self._filter is None:  # which would refuse them
            with contextlib.suppress(OSError):
                unshare(CLONE_NEWIPC)  # shared memory and the like would wait for the next job
        has_root = self._has_root_wall and self._change_root()
        if self.changes_user:
            self._become_nobody()
        drop_capabilities()
        prctl(PR_SET_DUMPABLE, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for kind, amounts in bounds.resources:
            resource.setrlimit(kind, amounts)
        has_filter = self._filter is not None and self._filter.install(has_root, bounds.may_start)
        if (bounds.may_start or not has_filter) and os.getuid() == 0:
            raise OSError(
                "the kernel's limit on processes does not bind root, who may not change its user here"
            )

    def _change_root(self) -> bool:
        try:
            os.chroot(".")
        except OSError:  # an ordinary user where user namespaces are refused
            return False
        os.chdir("/")
        return True

    def _become_nobody(self) -> None:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError:
            pass  # a container without that capability, or a user namespace without that id
