"""Finished embeddings that an encoder worker serves, each in a shared memory segment, head and body."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.ec_connector.connectors.segments import SegmentPool, SharedSegment
from triptych.kernels.copy import copy_checked
from triptych.store.codec import PendingHead

logger = logging.getLogger(__name__)

#: Seconds after which an output that nobody has read, and that is not in the store, may be evicted.
KEPT_SECONDS = 60.0


class NotFiniteError(Exception):
    """An output has NaN or infinity."""


@dataclass(eq=False, slots=True)
class ServedOutput:
    """One embedding as the store has it, head and body in one."""

    plan: ItemPlan
    source: EmbeddingSource
    segment: SharedSegment
    head: bytes
    nbytes: int
    since: float
    #: Connections that read it now.
    readers: int = 0
    stored: bool = False
    evicted: bool = False
    #: Done once a reader has had it.
    first_read: Future[None] = field(default_factory=Future)

    @property
    def view(self) -> memoryview:
        return memoryview(self.segment.memory)[: self.nbytes]

    def reusable(self, before: float) -> bool:
        """Its memory may be given to another output: it has been read or stored, or is from `before`."""
        return not self.readers and (self.first_read.done() or self.stored or self.since < before)


class ServedOutputs:
    """The served embeddings of one encoder worker within `limit` bytes; safe between threads.

    Memory of the oldest that are both read and stored is used again before new memory is taken, whose first
    write costs more than ten copies; within a full limit, also that of those that are read or stored. What
    is being read keeps its bytes until the reader has ended. `socket` and `address` are those of its server.
    """

    def __init__(self, limit: int, *, socket: str, address: str) -> None:
        self._pool = SegmentPool(limit)
        self._socket, self._address = socket, address
        self._lock = threading.Lock()
        self._by_hash: OrderedDict[str, ServedOutput] = OrderedDict()
        self._by_name: dict[str, ServedOutput] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self._pool.nbytes

    def __len__(self) -> int:
        return len(self._by_hash)

    def get(self, plan: ItemPlan) -> ServedOutput | None:
        """The output that is served by this plan."""
        with self._lock:
            known = self._by_hash.get(plan.mm_hash)
            return known if known is not None and known.plan == plan else None

    def offer(self, plan: ItemPlan, head: PendingHead, body: memoryview) -> ServedOutput | None:
        """The output, readable from now on; None when there is no room. NotFiniteError, in any thread.

        One pass over `body` copies it, completes the head and checks the numbers.
        """
        nbytes = head.nbytes + len(body)
        with self._lock:
            segment = self._acquire(nbytes)
        if segment is None:
            return None
        try:
            raw = _filled(segment, plan, head, body)
        except BaseException:
            with self._lock:
                self._pool.release(segment)
            raise
        source = EmbeddingSource(secrets.token_hex(16), self._socket, self._address)
        output = ServedOutput(plan, source, segment, raw, nbytes, time.monotonic())
        with self._lock:
            if (before := self._by_hash.get(plan.mm_hash)) is not None:
                self._evict(before)
            self._by_hash[plan.mm_hash] = self._by_name[source.name] = output
        return output

    def first_read(self, mm_hash: str) -> Future[None] | None:
        """Done once a reader has had the embedding; None where it is not served."""
        with self._lock:
            output = self._by_hash.get(mm_hash)
            return None if output is None else output.first_read

    def stored(self, mm_hash: str) -> None:
        """The embedding is in the store, too."""
        with self._lock:
            if (output := self._by_hash.get(mm_hash)) is not None:
                output.stored = True

    @contextmanager
    def reading(self, name: str) -> Iterator[ServedOutput | None]:
        """The output of this name, which stays until the block ends; None when it is gone."""
        with self._lock:
            output = self._by_name.get(name)
            if output is not None:
                output.readers += 1
        try:
            yield output
        finally:
            if output is not None:
                with self._lock:
                    output.readers -= 1
                    if not output.first_read.done():
                        output.first_read.set_result(None)
                    self._free(output)

    def close(self) -> None:
        """Frees all that nobody reads."""
        with self._lock:
            for output in list(self._by_hash.values()):
                self._evict(output)
            self._pool.close()

    def _acquire(self, nbytes: int) -> SharedSegment | None:
        if nbytes > self._pool.limit:
            return None
        outputs = list(self._by_hash.values())
        used_up = (o for o in outputs if o.stored and o.first_read.done() and not o.readers)
        if (last := next((o for o in used_up if self._pool.fits(nbytes, o.segment)), None)) is not None:
            self._evict(last)
        before = time.monotonic() - KEPT_SECONDS
        for output in outputs:
            if (segment := self._pool.acquire(nbytes)) is not None:
                return segment
            if not output.evicted and output.reusable(before):
                self._evict(output)
        return self._pool.acquire(nbytes)

    def _evict(self, output: ServedOutput) -> None:
        del self._by_hash[output.plan.mm_hash], self._by_name[output.source.name]
        output.evicted = True
        self._free(output)

    def _free(self, output: ServedOutput) -> None:
        if output.evicted and not output.readers:
            self._pool.release(output.segment)


def _filled(segment: SharedSegment, plan: ItemPlan, head: PendingHead, body: memoryview) -> bytes:
    """The head, after it and the body were copied into the segment."""
    target = np.frombuffer(segment.memory, dtype=np.uint8, count=len(body), offset=head.nbytes)
    if not copy_checked(np.frombuffer(body, dtype=np.uint8), target, plan.dtype, head.update):
        raise NotFiniteError
    raw = segment.memory[: head.nbytes] = head.finish()
    return raw
