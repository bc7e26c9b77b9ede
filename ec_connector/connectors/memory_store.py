"""A store inside one process: encoder outputs by mm_hash, bounded in bytes, nothing copied."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, MutableMapping, Sequence

from triptych.base.config import MIB
from triptych.base.types import ItemPlan
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


#: Byte budget of a store by default.
DEFAULT_BYTES = 512 * MIB


class MemoryStore(OutputCache):
    """A store that an encoder engine and a PD engine of one process share; safe between their threads.

    Evicts the least recently used. Outputs that are published and not loaded yet stay, the newest first, up
    to half of `max_bytes`, which is what a proxy publishes before loads. A single item of any size stays.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        super().__init__(max_bytes)
        self._awaited: OrderedDict[str, int] = OrderedDict()
        self._awaited_bytes = 0
        self._awaiting = threading.Lock()

    @property
    def awaited_bytes(self) -> int:
        """Bytes published and not loaded."""
        return self._awaited_bytes

    def publish(self, output: EncoderOutput) -> None:
        """Stores the output unless its key is present; in both cases it then awaits its load."""
        key = output.plan.mm_hash
        with self._awaiting:
            self._await(key, output.plan.nbytes)
            if key not in self:
                self[key] = output

    def load(self, plan: ItemPlan) -> EncoderOutput | None:
        """The key's output; None when it was evicted or has another plan."""
        output = self.get(plan.mm_hash)
        with self._awaiting:
            self._forget(plan.mm_hash)
        return output if output is not None and output.plan == plan else None

    async def look_up(self, keys: Sequence[tuple[str, str]]) -> list[ItemPlan | None]:
        """As `EmbeddingStore.look_up`; found items await a load again."""
        return [self._found(mm_hash, namespace) for mm_hash, namespace in keys]

    def _found(self, mm_hash: str, namespace: str) -> ItemPlan | None:
        output = self.get(mm_hash)
        if output is None or output.plan.namespace != namespace:
            return None
        self.publish(output)
        return output.plan

    def __delitem__(self, mm_hash: str) -> None:
        with self._awaiting:
            self._forget(mm_hash)
        super().__delitem__(mm_hash)

    def _await(self, key: str, nbytes: int) -> None:
        self.pin(key)
        if key in self._awaited:
            self._forget(key)
        self._awaited[key] = nbytes
        self._awaited_bytes += nbytes
        while self.awaited_bytes > self._max_bytes // 2 and len(self._awaited) > 1:
            self._forget(next(iter(self._awaited)))

    def _forget(self, key: str) -> None:
        nbytes = self._awaited.pop(key, None)
        if nbytes is not None:
            self._awaited_bytes -= nbytes
            self.unpin(key)
