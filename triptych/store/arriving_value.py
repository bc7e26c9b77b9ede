"""Values whose checksum is computed while they are received, piece by piece.

The bytes are still in the CPU's cache then, no thread switch is needed, and the event loop is blocked for one
piece of a few hundred KiB at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from triptych.store.bulk import BulkRefused, Received, ScatterBuffer, scattered
from triptych.store.codec import CHECKSUM_SPAN, HEAD_BYTES, Damage, Head, decode_head


class ArrivingValue:
    """A value being received into `memory`, which has its length, and its checksum so far."""

    def __init__(self, memory: Received, *, mm_hash: str, namespace: str) -> None:
        self._buffer = scattered(memory)
        self._mm_hash = mm_hash
        self._namespace = namespace
        self._head: Head | Damage | None = None
        self._state = xxhash.xxh3_128()
        self._hashed = 0

    def feed(self, filled: int) -> None:
        """The first `filled` bytes have arrived."""
        if self._head is None and filled >= min(HEAD_BYTES, len(self._buffer)):
            self._head = self._read_head()
        if isinstance(self._head, Head) and filled > self._hashed:
            for piece in self._buffer.between(self._hashed, filled):
                self._state.update(piece)
            self._hashed = filled

    def _read_head(self) -> Head | Damage:
        head = decode_head(self._buffer.read(0, HEAD_BYTES), mm_hash=self._mm_hash, namespace=self._namespace)
        if isinstance(head, Head):
            if len(self._buffer) != head.body_offset + (0 if head.parts else head.plan.nbytes):
                return Damage("the body is cut off or too long")
            start, stop = CHECKSUM_SPAN
            self._state.update(self._buffer.read(0, start))
            self._hashed = stop
        return head

    def result(self) -> Head | Damage:
        """The head, if the whole value has arrived and its checksum is correct.

        The checksum of a split value covers its parts too, which come later.
        """
        self.feed(len(self._buffer))
        assert self._head is not None
        if isinstance(self._head, Damage) or self._head.parts:
            return self._head
        if self._state.digest() == self._head.checksum:
            return self._head
        return Damage("the checksum is wrong")


def behind_a_head(nbytes: int, body: Sequence[Received]) -> ScatterBuffer:
    """Memory for a value of `nbytes`: its head, then the body. BulkRefused where there is no such head."""
    head = nbytes - sum(len(memory) for memory in body)
    if not 0 <= head <= HEAD_BYTES:
        raise BulkRefused(f"the value has {nbytes} bytes, no head and body of this item")
    pieces = [piece for memory in body for piece in scattered(memory).pieces]
    return ScatterBuffer([memoryview(bytearray(head)), *pieces])
