"""The jail: confined children of a warm parent, one a run, each forked before its job is known."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from agentrl.gym import confine, job
from agentrl.gym.confine import Bounds, Limits, Walls
from agentrl.gym.unshared import Unshared
from agentrl.gym.watch import watch


@dataclass(frozen=True, slots=True)
class Cell:
    """A child that confined itself and waits for its job, or that had it."""

    pid: int
    bounds: Bounds
    scratch: str  # its folder, and where the kernel allows it the root of its file system
    jobs: int  # the pipe that brings its job
    results: int  # the pipe of what it sends

    def give(self, text: Unshared, num_skipped: int, max_bytes: int) -> None:
        """Hand the job over; BrokenPipeError from a child that is no more."""
        text.write(self.jobs, job.JOB_HEADER.pack(text.size, num_skipped, max_bytes))


class Jail:
    """Runs jobs in confined children, one after another; their scratch folders come and go in `base`.

    No two live at a time: a child is forked when the one before it was killed, so that no job ever meets
    another child. It confines itself before it is given a job, which is the only one that it gets. The next
    one, the spare, is made between two calls, so that a call waits for it only where calls follow at once.
    """

    def __init__(
        self, base: str, walls: Walls, own_namespaces: bool, fork_hooks: Sequence[dict[str, Any]] = ()
    ) -> None:
        self._base = base
        self._namespaces = confine.ProcessNamespaces() if own_namespaces else None
        self._walls = walls
        self._fork_hooks = fork_hooks  # arguments of os.register_at_fork, for children that may fork
        self._num_cells = 0
        self._bounds: Bounds | None = None  # of the last call
        self._used: Cell | None = None  # killed, and perhaps not yet gone
        self._spare: Cell | None = None

    def call(self, text: Unshared, answers: Unshared, num_cases: int, limits: Limits) -> None:
        """Put one answer a case into `answers`; a case that ends its child costs the later ones a new child.

        Where cases are left over, the last answer is theirs too.
        """
        self._bounds = bounds = self._walls.bounds(limits, num_cases)
        num_answers = num_timeouts = 0
        while num_answers < num_cases:
            if num_timeouts >= limits.timeouts:
                answers.add(job.frame(job.ERROR, "not run after too many timeouts"))
                return
            cell = self._start(text, num_answers, bounds, limits.result_bytes)
            try:
                watched = watch(cell.pid, cell.results, answers, num_cases - num_answers, limits)
            finally:
                self._kill(cell)
            if not watched.loaded:  # the same would happen to every case
                return
            num_answers += watched.num_answers
            num_timeouts += watched.timed_out

    def renew(self) -> None:
        """See the last child off, and have the next one ready for a call with the same bounds."""
        used, self._used = self._used, None
        if used and not self._namespaces:
            self._bury(used)  # first, since it ends every process that is left
        if self._bounds and not self._spare:
            self._spare = self._prepare(self._bounds)
        if used and self._namespaces:
            self._bury(used)  # most of it the kernel does meanwhile, on another core

    def close(self) -> None:
        """End every child."""
        self._clear()
        if self._spare:
            self._end(self._spare)
            self._spare = None

    def _start(self, text: Unshared, num_skipped: int, bounds: Bounds, max_bytes: int) -> Cell:
        """A child that has the job: the spare, if it is confined as it should be and alive."""
        self._clear()
        spare, self._spare = self._spare, None
        if spare and spare.bounds == bounds:
            try:
                spare.give(text, num_skipped, max_bytes)
                return spare
            except BrokenPipeError:
                pass
        if spare:
            self._end(spare)
        cell = self._prepare(bounds)
        with contextlib.suppress(BrokenPipeError):  # what it sent says why it could not be confined
            cell.give(text, num_skipped, max_bytes)
        return cell

    def _prepare(self, bounds: Bounds) -> Cell:
        self._num_cells += 1
        scratch = f"{self._base}/{self._num_cells}"
        os.mkdir(scratch, 0o700)
        if self._walls.changes_user:
            with contextlib.suppress(OSError):
                os.chown(scratch, confine.NOBODY, confine.NOBODY)
        if self._namespaces:
            self._namespaces.renew()
        job_end, jobs = os.pipe()
        results, result_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._be_child(scratch, job_end, result_end, bounds)
        os.close(job_end)
        os.close(result_end)
        return Cell(pid, bounds, scratch, jobs, results)

    def _be_child(self, scratch: str, job_end: int, result_end: int, bounds: Bounds) -> NoReturn:
        try:
            os.setsid()
            os.chdir(scratch)
            null = os.open(os.devnull, os.O_RDWR)  # its own: flags of one that is shared would outlive it
            for fd in range(3):
                os.dup2(null, fd)
            os.dup2(result_end, job.RESULT_FD)
            os.dup2(job_end, job.JOB_FD)
            os.closerange(job.JOB_FD + 1, 256)
            for hook in self._fork_hooks if bounds.may_start else ():
                os.register_at_fork(**hook)
            job.rehearse()
            self._walls.raise_around(bounds)
            job.work()
        except BaseException as error:
            with contextlib.suppress(BaseException):
                job.send(job.ERROR, job.one_line(f"confinement failed: {error}"))
        finally:
            os._exit(0)

    def _kill(self, cell: Cell) -> None:
        """Kill a child, and all that it may have started."""
        self._used = cell
        with contextlib.suppress(ProcessLookupError):
            os.killpg(cell.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(cell.pid, signal.SIGKILL)
        if cell.bounds.may_start:  # others may be left; without them the signal is the end
            self._clear()

    def _clear(self) -> None:
        if self._used:
            self._bury(self._used)
            self._used = None

    def _end(self, cell: Cell) -> None:
        self._kill(cell)
        self._clear()

    def _bury(self, cell: Cell) -> None:
        """Wait until nothing is left of a child that was killed."""
        os.close(cell.jobs)
        os.close(cell.results)
        os.waitpid(cell.pid, 0)
        while not self._namespaces:  # orphans come to this process, their reaper
            try:
                left, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if left == 0:
                for orphan in _children():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(orphan, signal.SIGKILL)
                time.sleep(0.0005)
        remove_folder(cell.scratch)


def remove_folder(path: str) -> None:
    """Remove a folder with all that is in it, as far as that is possible; no link is followed.

    Folders in it are moved beside it first, so that no depth, and no length of a path, is too much.
    """
    waiting, num_moved = [path], 0
    while waiting:
        folder = waiting.pop()
        try:
            os.rmdir(folder)
            continue
        except OSError:  # not empty
            pass
        names: list[str] = []
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
            names = os.listdir(folder)
        for name in names:
            inner = f"{folder}/{name}"
            try:
                os.unlink(inner)
            except OSError:  # a folder
                num_moved += 1
                with contextlib.suppress(OSError):
                    os.chmod(inner, 0o700)
                    os.rename(inner, f"{path}-{num_moved}")
                    waiting.append(f"{path}-{num_moved}")
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _children() -> list[int]:
    """Direct children of this process, by looking at every process's parent."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found
