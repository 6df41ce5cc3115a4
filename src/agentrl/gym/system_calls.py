"""A filter of system calls (seccomp): code that only computes needs few, so all others fail with EPERM."""

import ctypes
import errno
import os
import struct

PR_GET_SECCOMP, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 21, 22, 2
KILL_PROCESS, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
# classic BPF: ld [k]; jeq k; jge k; ret k
LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16  # offsets in struct seccomp_data

# name -> number on (x86_64, aarch64), None where the architecture lacks it. Source: the kernel's tables.
COMPUTE: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "stat": (4, None),
    "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "lseek": (8, 62),
    "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "ftruncate": (77, 46),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "getcwd": (79, 17),
    "getdents64": (217, 61), "readlink": (89, None), "readlinkat": (267, 78),
    "pipe": (22, None), "pipe2": (293, 59), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "close_range": (436, 436),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233),
    "brk": (12, 214), "membarrier": (324, 283),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "getrusage": (98, 165), "getrandom": (318, 278), "uname": (63, 160),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "sched_yield": (24, 124),
    "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
FILES: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "openat": (257, 56), "unlink": (87, None), "unlinkat": (263, 35),
}  # fmt: skip
START: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220), "clone3": (435, 435), "fork": (57, None), "vfork": (58, None), "setsid": (112, 157),
    "wait4": (61, 260), "waitid": (247, 95),
}  # fmt: skip
# name -> numbers, the argument to look at, and the values of it that are let through
IOCTL = ((16, 29), 1, (0x5401, 0x5413, 0x5450, 0x5451))  # is it a terminal, its size; close-on-exec
FCNTL = ((72, 25), 1, (0, 1, 2, 3, 4, 1030))  # duplicate, flags; not "send a signal to"
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*


Step = tuple[int, int, int, int]  # code, jump if true, jump if false, k
ALLOWED: list[Step] = [(RETURN, 0, 0, ALLOW)]
DENIED: list[Step] = [(RETURN, 0, 0, ERRNO | errno.EPERM)]


def program(machine: str, may_open: bool, may_start: bool) -> bytes:
    """The filter for a machine as BPF instructions, 8 bytes each; KeyError for an unknown architecture.

    may_open lets files be opened and removed; may_start lets processes and threads be started.
    Never let through: sockets, exec, signals to others, tracing, limits, mounts, and all that is not named.

    A binary search over ranges of numbers: the kernel tries a new filter on every number that there is, so a
    chain of comparisons would take most of the time of installing one.
    """
    column, architecture = ARCHITECTURES[machine]
    verdicts = _verdicts(column, may_open, may_start)
    ranges: list[tuple[int, list[Step]]] = [(0, verdicts.get(0, DENIED))]  # first number, what to do
    for number in range(1, max(verdicts) + 2):
        verdict = verdicts.get(number, DENIED)
        if verdict is not ranges[-1][1]:
            ranges.append((number, verdict))
    code: list[Step] = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER_AT),
        *_search(ranges),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def _verdicts(column: int, may_open: bool, may_start: bool) -> dict[int, list[Step]]:
    """What to do for each number that is not always denied."""
    calls = COMPUTE | (FILES if may_open else {}) | (START if may_start else {})
    verdicts = {number: ALLOWED for numbers in calls.values() if (number := numbers[column]) is not None}
    for numbers, argument, values in (IOCTL, FCNTL):
        look = (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument)
        let = [step for value in values for step in ((IF_EQUAL, 0, 1, value), *ALLOWED)]
        verdicts[numbers[column]] = [look, *let, *DENIED]
    return verdicts


def _search(ranges: list[tuple[int, list[Step]]]) -> list[Step]:
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    return [(IF_AT_LEAST, len(below), 0, ranges[middle][0]), *below, *above]


class SystemCallFilter:
    """The filters for this machine, built once; `install` puts one on the calling process, for ever."""

    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._programs: dict[tuple[bool, bool], bytes] = {}  # struct sock_fprog: number of steps, address
        self._steps: list[ctypes.Array[ctypes.c_char]] = []
        machine = os.uname().machine
        if machine in ARCHITECTURES:
            for may_open in (False, True):
                for may_start in (False, True):
                    code = program(machine, may_open, may_start)
                    steps = ctypes.create_string_buffer(code, len(code))
                    self._steps.append(steps)  # it must live as long as its address
                    head = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(steps))
                    self._programs[may_open, may_start] = head

    @property
    def is_supported(self) -> bool:
        """Whether this machine and its kernel have such filters."""
        return bool(self._programs) and self._prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0

    def install(self, may_open: bool, may_start: bool) -> bool:
        """Whether the kernel took the filter; the process must have given up new privileges before."""
        if not self._programs:
            return False
        head = self._programs[may_open, may_start]
        return self._prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head, 0, 0) == 0
