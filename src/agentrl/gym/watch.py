"""Watching a child at its job: frames, sizes and clocks are looked at, answers are passed on unread."""

import os
import select
import signal
import time
from dataclasses import dataclass

from agentrl.gym.confine import Limits
from agentrl.gym.job import CONFINED, ERROR, HEADER, MAX_ERROR, READY, VALUE, frame
from agentrl.gym.plain import TOO_LARGE
from agentrl.gym.unshared import Unshared

POLL_SECONDS = 0.002  # the shortest wait between two looks at a child's CPU clock
CONFINE_SECONDS = 30.0  # of wall time, for what a child does before it has its job
MAX_ERROR_BYTES = 10 * MAX_ERROR  # with every character escaped to ten
UNSTABLE = b"U"  # kind of an error that may be another one next time, and so is not cached

EXPECTED = ((CONFINED,), (READY,), (VALUE, ERROR))  # kinds of frames, by stage
LOADED = 2


@dataclass(frozen=True, slots=True)
class Watched:
    """What a child did: the answers themselves are elsewhere."""

    loaded: bool  # the source; if not, the one answer is that of every case
    num_answers: int  # up to the first case that ended the child
    timed_out: bool


def parse_answers(frames: bytes, num_cases: int) -> list[tuple[bytes, str]]:
    """Kind (VALUE, ERROR, UNSTABLE) and text of each case's answer; ValueError if there is none.

    The last frame also answers the cases for which there is no frame.
    """
    answers: list[tuple[bytes, str]] = []
    at = 0
    while at < len(frames):
        kind, size = HEADER.unpack_from(frames, at)
        at += HEADER.size + size
        answers.append((kind, frames[at - size : at].decode("ascii", "replace")))
    if not 0 < len(answers) <= num_cases:
        raise ValueError(f"{len(answers)} answers to {num_cases} cases")
    return answers + [answers[-1]] * (num_cases - len(answers))


def watch(pid: int, fd: int, answers: Unshared, num_cases: int, limits: Limits) -> Watched:
    """Put a frame for each case at the end of `answers`, up to the first case that ends the child.

    `pid` is a child of this process that was just given a job, `fd` what it sends. A child that ran out of
    time is left as it is.
    """
    clock = (~pid << 3) | 2  # the CPU clock of process pid: clock_getcpuclockid(3)
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    at = answers.size  # what was not looked at yet
    stage = num_answers = 0
    cpu_end, wall_end = float("inf"), time.monotonic() + CONFINE_SECONDS

    def end(kind: bytes, text: str) -> Watched:
        answers.size = at
        answers.add(frame(kind, text))
        return Watched(stage == LOADED, num_answers + 1, text == "timeout")

    while True:
        cpu = time.clock_gettime(clock)  # a process that ended, but was not waited for, still has its clock
        wall = time.monotonic()
        progressed = False
        while answers.size - at >= HEADER.size:
            kind, size = answers.unpack(HEADER, at)
            if size > (limits.result_bytes if kind == VALUE else MAX_ERROR_BYTES):
                return end(ERROR, TOO_LARGE)
            if answers.size - at < HEADER.size + size:
                break
            progressed = True
            if kind not in EXPECTED[stage] and (kind != ERROR or stage == LOADED):
                return end(ERROR, "garbled answer")
            if kind in (VALUE, ERROR):
                at += HEADER.size + size
                num_answers += 1
                if num_answers == num_cases or stage < LOADED:
                    answers.size = at
                    return Watched(stage == LOADED, num_answers, False)
            else:
                answers.cut(at, HEADER.size + size)
                stage += 1
        if progressed:
            cpu_end, wall_end = cpu + limits.cpu_seconds, wall + limits.wall_seconds
        elif cpu >= cpu_end:
            return end(ERROR, "timeout")
        elif wall >= wall_end:
            return end(UNSTABLE, "timeout")
        wait = min(wall_end - wall, max(cpu_end - cpu, POLL_SECONDS))
        if poller.poll(1 + wait * 1000) and not answers.read(fd, 1 << 16):
            return end(*_how_it_ended(pid, answers.size > at))


def _how_it_ended(pid: int, in_frame: bool) -> tuple[bytes, str]:
    """A child that closed its pipe without an answer: it ended, or will be ended."""
    deadline = time.monotonic() + 0.5  # a crash on a busy machine takes a while to be reaped
    while time.monotonic() < deadline:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if status is None:
            time.sleep(0.001)
        elif status.si_code == os.CLD_EXITED:
            return ERROR, "garbled answer" if in_frame else "process exited"
        elif status.si_status == signal.SIGKILL:
            return UNSTABLE, "process killed"
        else:
            return ERROR, f"process crashed ({_signal_name(status.si_status)})"
    return UNSTABLE, "garbled answer"  # on a less busy machine it may have ended in time


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
