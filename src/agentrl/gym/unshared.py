"""Memory that no child inherits: what one job and its answers say is kept from the next job's process."""

import mmap
import os
import struct
from typing import Any

SMALL = 1 << 16  # bytes at first, and again after each `clear`


class Unshared:
    """Bytes at the end of which more are put, in pages that the kernel leaves out of every fork.

    They go from descriptor to descriptor without a copy anywhere else: what a process has freed is still in
    its memory, and its children have it too. A child that looks here crashes.
    """

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, SMALL, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.size = 0

    def read(self, fd: int, most: int) -> int:
        """Add what a descriptor gives, at most so many bytes; how many there were, 0 at its end."""
        self._make_room(most)
        with memoryview(self._map) as whole, whole[self.size : self.size + most] as room:
            num_read = os.readv(fd, [room])
        self.size += num_read
        return num_read

    def read_exactly(self, fd: int, size: int) -> bool:
        """Add so many bytes from a descriptor; False where it ends before."""
        end = self.size + size
        while self.size < end:
            if not self.read(fd, end - self.size):
                return False
        return True

    def write(self, fd: int, head: bytes) -> None:
        """Write `head`, then everything here, to a pipe; BrokenPipeError when nobody reads."""
        with memoryview(self._map) as whole:
            written = os.writev(fd, [head, whole[: self.size]]) - len(head)
            assert written >= 0  # a pipe takes a few bytes at once or not at all
            while written < self.size:
                with whole[written : self.size] as rest:
                    written += os.write(fd, rest)

    def add(self, data: bytes) -> None:
        """Put bytes that are no secret at the end."""
        self._make_room(len(data))
        self._map[self.size : self.size + len(data)] = data
        self.size += len(data)

    def unpack(self, layout: struct.Struct, at: int) -> tuple[Any, ...]:
        """The fields that lie at that place."""
        return layout.unpack_from(self._map, at)

    def cut(self, at: int, size: int) -> None:
        """Take bytes out of the middle."""
        self._map.move(at, at + size, self.size - at - size)
        self.size -= size

    def clear(self) -> None:
        """Forget everything."""
        self.size = 0
        if len(self._map) > SMALL:
            self._map.resize(SMALL)

    def _make_room(self, size: int) -> None:
        if self.size + size > len(self._map):
            self._map.resize(max(self.size + size, 2 * len(self._map)))
