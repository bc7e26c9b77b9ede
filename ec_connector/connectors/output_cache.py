"""A cache of encoder outputs on the host, bounded in bytes."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, MutableMapping

from triptych.ec_connector.base import EncoderOutput


class OutputCache(MutableMapping[str, EncoderOutput]):
    """An LRU cache from mm_hash to encoder output, safe between threads.

    A flushed store can be filled again from it, without the tower. Pinned entries (a save is running) stay
    even above `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, EncoderOutput] = OrderedDict()
        self._pinned: Counter[str] = Counter()
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all outputs held."""
        return self._nbytes

    def __getitem__(self, mm_hash: str) -> EncoderOutput:
        with self._lock:
            self._entries.move_to_end(mm_hash)
            return self._entries[mm_hash]

    def __setitem__(self, mm_hash: str, output: EncoderOutput) -> None:
        with self._lock:
            self._discard(mm_hash)
            self._entries[mm_hash] = output
            self._nbytes += output.plan.nbytes
            self._trim()

    def __delitem__(self, mm_hash: str) -> None:
        with self._lock:
            if not self._discard(mm_hash):
                raise KeyError(mm_hash)

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def pin(self, mm_hash: str) -> None:
        """Pins the entry until as many calls of `unpin`."""
        with self._lock:
            self._pinned[mm_hash] += 1

    def unpin(self, mm_hash: str) -> None:
        """Reverts one `pin`."""
        with self._lock:
            self._pinned[mm_hash] -= 1
            if self._pinned[mm_hash] <= 0:
                del self._pinned[mm_hash]
            self._trim()

    def _discard(self, mm_hash: str) -> bool:
        output = self._entries.pop(mm_hash, None)
        if output is None:
            return False
        self._nbytes -= output.plan.nbytes
        return True

    def _trim(self) -> None:
        for mm_hash in list(self._entries):
            if self._nbytes <= self._max_bytes:
                return
            if mm_hash not in self._pinned:
                self._discard(mm_hash)
