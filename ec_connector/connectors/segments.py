"""Shared memory that an encoder worker's outputs lie in: segments, and the pool of them."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

#: Not in Python's fcntl: no new writable mapping and no write, while the mapping made before goes on.
_F_SEAL_FUTURE_WRITE = 0x10


_SEALS = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


#: Sizes are multiples of this, so that segments of nearly equal items serve each other.
_GRAIN = 64 << 10


class SharedSegment:
    """A memory file without a name, which only this object may write. It ends with its last descriptor.

    OSError where the kernel has no sealed memory files.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("triptych-embedding", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            self.memory = mmap.mmap(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Frees the memory once no reader has a descriptor."""
        with contextlib.suppress(BufferError):  # a send was broken off: its view goes with the garbage
            self.memory.close()
        os.close(self.fd)


class SegmentPool:
    """Segments within `limit` bytes, those in use and those kept for reuse: new pages cost more than a copy.

    Not safe between threads.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: Bytes of all segments.
        self.nbytes = 0
        self._free: list[SharedSegment] = []

    def acquire(self, nbytes: int) -> SharedSegment | None:
        """A segment of at least `nbytes`; None when there is no room. OSError when the system has none."""
        size = _rounded(nbytes)
        fitting = [segment for segment in self._free if self.fits(nbytes, segment)]
        if fitting:
            best = min(fitting, key=lambda segment: segment.size)
            self._free.remove(best)
            return best
        while self._free and self.nbytes + size > self.limit:
            self._close(self._free.pop(0))
        if self.nbytes + size > self.limit:
            return None
        segment = SharedSegment(size)
        self.nbytes += size
        return segment

    @staticmethod
    def fits(nbytes: int, segment: SharedSegment) -> bool:
        """Whether `nbytes` go into the segment and take half of it or more."""
        size = _rounded(nbytes)
        return size <= segment.size <= 2 * size

    def release(self, segment: SharedSegment) -> None:
        """Keeps the segment for reuse: nobody reads it."""
        self._free.append(segment)

    def close(self) -> None:
        """Frees the segments that are not in use."""
        while self._free:
            self._close(self._free.pop())

    def _close(self, segment: SharedSegment) -> None:
        self.nbytes -= segment.size
        segment.close()


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _GRAIN) * _GRAIN


def is_sealed(fd: int) -> bool:
    """Whether the descriptor is of a memory file that its holder cannot change."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False
