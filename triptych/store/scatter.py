"""Scatter buffers: the memory of one value in several pieces, filled from front to back.

The head of a stored value is not part of the tensor, and memory of a pool may be in several pieces.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate


class ScatterBuffer:
    """A writable buffer over all `pieces`, in their order."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self.pieces = [piece for piece in pieces if len(piece)]
        self._starts = [0, *accumulate(len(piece) for piece in self.pieces)]

    def __len__(self) -> int:
        return self._starts[-1]

    def rest(self, start: int) -> memoryview:
        """From byte `start`, which is inside, to the end of its piece."""
        index = bisect_right(self._starts, start) - 1
        return self.pieces[index][start - self._starts[index] :]

    def between(self, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes [start, stop), in pieces."""
        while start < min(stop, len(self)):
            piece = self.rest(start)[: stop - start]
            yield piece
            start += len(piece)

    def write(self, start: int, data: bytes) -> None:
        """Copies `data` to byte `start` and on; it must fit."""
        for piece in self.between(start, start + len(data)):
            piece[:] = data[: len(piece)]
            data = data[len(piece) :]

    def read(self, start: int, stop: int) -> bytes:
        """A copy of bytes [start, stop)."""
        return b"".join(self.between(start, stop))


#: Memory that a value is received into.
Received = memoryview | ScatterBuffer


def scattered(memory: Received) -> ScatterBuffer:
    """The memory as pieces, whichever it is."""
    return memory if isinstance(memory, ScatterBuffer) else ScatterBuffer([memory])
