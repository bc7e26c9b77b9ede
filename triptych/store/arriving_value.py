"""Values whose checksum is computed while they are received, piece by piece.

The bytes are still in the CPU's cache then, no thread switch is needed, and the event loop is blocked for one
piece of a few hundred KiB at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from triptych.base.types import ItemPlan
from triptych.store.bulk import BulkRefused, Received, ScatterBuffer, ValueTooLarge, scattered
from triptych.store.codec import CHECKSUM_SPAN, HEAD_BYTES, Damage, Head, decode_head
from triptych.store.results import Loaded, LoadResult, Missing


class ArrivingValue:
    """A value being received into `memory`, which has its length, and its checksum so far.

    `undivided`: one that the store would split is head and body in one, too.
    """

    def __init__(self, memory: Received, *, mm_hash: str, namespace: str, undivided: bool = False) -> None:
        self._undivided = undivided
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
            if len(self._buffer) != head.body_offset + (0 if self._split(head) else head.plan.nbytes):
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
        if isinstance(self._head, Damage) or self._split(self._head):
            return self._head
        if self._state.digest() == self._head.checksum:
            return self._head
        return Damage("the checksum is wrong")

    def _split(self, head: Head) -> bool:
        return head.parts > 0 and not self._undivided


class ArrivingItem:
    """The value of an item being received from an encoder worker, head and body in one, into `body`."""

    def __init__(self, plan: ItemPlan, body: Received) -> None:
        self._plan = plan
        self._body = body
        self._value: ArrivingValue | None = None

    def begin(self, nbytes: int) -> ScatterBuffer:
        """Memory for a value of `nbytes`. ValueTooLarge, before any is allocated, for another item's."""
        if not self._plan.nbytes < nbytes <= self._plan.nbytes + HEAD_BYTES:
            raise ValueTooLarge(f"the value has {nbytes} bytes, the plan says {self._plan.nbytes}")
        memory = behind_a_head(nbytes, [self._body])
        self._value = ArrivingValue(
            memory, mm_hash=self._plan.mm_hash, namespace=self._plan.namespace, undivided=True
        )
        return memory

    def feed(self, filled: int) -> None:
        """The first `filled` bytes have arrived."""
        assert self._value is not None
        self._value.feed(filled)

    def result(self) -> LoadResult:
        """The body, if all has arrived, of this plan and with its checksum."""
        assert self._value is not None
        head = self._value.result()
        if isinstance(head, Damage):
            return Missing(head.reason)
        if head.plan != self._plan:
            return Missing("served with another plan than asked for")
        return Loaded(self._body, head.producer)


def behind_a_head(nbytes: int, body: Sequence[Received]) -> ScatterBuffer:
    """Memory for a value of `nbytes`: its head, then the body. BulkRefused where there is no such head."""
    head = nbytes - sum(len(memory) for memory in body)
    if not 0 <= head <= HEAD_BYTES:
        raise BulkRefused(f"the value has {nbytes} bytes, no head and body of this item")
    pieces = [piece for memory in body for piece in scattered(memory).pieces]
    return ScatterBuffer([memoryview(bytearray(head)), *pieces])
