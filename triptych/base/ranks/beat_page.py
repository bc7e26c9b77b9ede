"""The beats of a worker's other ranks, in a page of memory that all of its processes share."""

from __future__ import annotations

import mmap
import os

_WORD = 8
_COUNT, _SLOW = 0, 1


class BeatPage:
    """Two words for each rank, which it alone writes: its beats, and how many reasons it has to be slow."""

    def __init__(self, descriptor: int, size: int) -> None:
        """The page in the file of this descriptor, for `size` ranks."""
        self._map = mmap.mmap(descriptor, 2 * _WORD * size)
        self._words = memoryview(self._map).cast("Q")

    def count(self, rank: int) -> int:
        """How often the rank has beaten."""
        return self._words[2 * rank + _COUNT]

    def slow(self, rank: int) -> bool:
        """Whether the rank has said that it may stand still longer than usual."""
        return self._words[2 * rank + _SLOW] > 0

    def add(self, rank: int, *, beats: int = 0, slow: int = 0) -> None:
        """Called by the rank itself."""
        self._words[2 * rank + _COUNT] += beats
        self._words[2 * rank + _SLOW] += slow


def new_page(size: int) -> int:
    """The descriptor of the file of a new page for `size` ranks; the caller's to close."""
    descriptor = os.memfd_create("rank-beats", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, 2 * _WORD * size)
    return descriptor
