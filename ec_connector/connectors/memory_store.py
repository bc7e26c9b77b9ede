"""A store inside one process: encoder outputs by mm_hash, bounded in bytes, nothing copied."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from triptych.base.config import MIB
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import EncoderOutput
from triptych.ec_connector.connectors.output_cache import OutputCache

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
