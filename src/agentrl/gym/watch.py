"""Watching a child at its job: frames, sizes and clocks are looked at, answers are passed on unread."""

import os
import select
import signal
import time

from agentrl.gym.confine import Limits
from agentrl.gym.job import ERROR, HEADER, MAX_ERROR, READY, VALUE
from agentrl.gym.plain import TOO_LARGE

POLL_SECONDS = 0.002  # the shortest wait between two looks at a child's CPU clock

# what an answer's first entry says; an unstable answer may differ next time and is not cached
Answer = tuple[str, str]
STABLE, UNSTABLE, RESULT = "error", "unstable", "value"


def watch(pid: int, fd: int, num_cases: int, limits: Limits) -> tuple[bool, list[Answer]]:
    """Whether the source loaded, and the answers up to the first case that ended the child.

    `pid` is a child of this process that was just given a job, `fd` what it sends. A child that ran out of
    time is left as it is.
    """
    clock = (~pid << 3) | 2  # the CPU clock of process pid: clock_getcpuclockid(3)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    buffer = bytearray()
    answers: list[Answer] = []
    loaded = False
    cpu_end = time.clock_gettime(clock) + limits.cpu_seconds
    wall_end = time.monotonic() + limits.wall_seconds

    def end(kind: str, text: str) -> tuple[bool, list[Answer]]:
        return loaded, [*answers, (kind, text)]

    while True:
        cpu = time.clock_gettime(clock)  # a process that ended, but was not waited for, still has its clock
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
                return end(*_how_it_ended(pid, bool(buffer)))
            buffer += part


def _how_it_ended(pid: int, in_frame: bool) -> Answer:
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
