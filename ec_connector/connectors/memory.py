"""The in-process connector and its store, for the colocated topology's only replica and for unit tests."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from triptych.base.config import MIB
from triptych.base.log import log_fields, short
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorWorker,
    ECTransferConfig,
    EncoderCacheMap,
    EncoderOutput,
    OutputCache,
)
from triptych.ec_connector.connectors.host_buffers import DeviceCopier
from triptych.ec_connector.connectors.scheduler_role import TableScheduler
from triptych.ec_connector.metadata import Fetch, LoadId, Reports, TransferMetadata

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


logger = logging.getLogger(__name__)


class MemoryConnectorScheduler(TableScheduler):
    """The scheduler role, as with any store."""


class MemoryConnectorWorker(ECConnectorWorker):
    """The worker role over the `MemoryStore` of its config; ValueError for a config without one.

    Every transfer has finished when its call returns. On a CPU nothing is copied.
    """

    def __init__(self, config: ECTransferConfig, on_progress: Callable[[], None] | None = None) -> None:
        super().__init__(config, on_progress)
        if not isinstance(config.store, MemoryStore):
            raise ValueError("the memory connector needs a store: ECTransferConfig(store=MemoryStore())")
        self._store = config.store
        self._reports = Reports(self.on_progress)
        self._copies: dict[LoadId, EncoderOutput] = {}
        self._copier = DeviceCopier(config.device)

    def start_load_caches(self, metadata: ECConnectorMetadata, encoder_cache: EncoderCacheMap) -> None:
        if not isinstance(metadata, TransferMetadata):
            raise TypeError(f"the memory connector needs TransferMetadata, not {type(metadata).__name__}")
        for load_id in metadata.drops:
            self._copies.pop(load_id, None)
            self._reports.forget(load_id)
        for fetch in metadata.fetches:
            self._fetch(fetch)
        for load_id in metadata.moves:
            self._move(load_id, encoder_cache)

    def _fetch(self, fetch: Fetch) -> None:
        load_id = fetch.load_id
        if not self.config.is_consumer:
            self._reports.not_loaded_by_a_producer(load_id)
            return
        entry = self._store.load(fetch.plan)
        if entry is None:
            self._reports.failed(load_id, "no such key, or stored with another plan")
            return
        self._copies[load_id] = entry
        self._reports.fetched(load_id, 0.0)

    def _move(self, load_id: LoadId, encoder_cache: EncoderCacheMap) -> None:
        if load_id.mm_hash not in encoder_cache:
            entry = self._copies.get(load_id)
            if entry is None:
                self._reports.failed(load_id, "its host copy is gone")
                return
            try:
                encoder_cache[load_id.mm_hash] = self._on_device(entry)
            except Exception as error:
                logger.exception(
                    "copy of %s to the device failed",
                    short(load_id.mm_hash),
                    extra=log_fields(mm_hash=load_id.mm_hash),
                )
                self._reports.not_moved(load_id, error)
                return
        self._reports.loaded(load_id)

    def _on_device(self, entry: EncoderOutput) -> EncoderOutput:
        data, wait = self._copier.to_device([entry.data.reshape(-1).view(torch.uint8)], entry.plan)
        if wait is None:
            return entry
        wait()
        return EncoderOutput(entry.plan, data)

    def save_caches(self, encoder_cache: EncoderCacheMap, mm_hash: str, damaged_digest: str = "") -> None:
        if not self.config.is_producer:
            self._reports.not_saved_by_a_consumer(mm_hash)
            return
        self._store.publish(encoder_cache[mm_hash])
        self._reports.saved(mm_hash)

    def get_finished(self) -> ECConnectorOutput:
        return self._reports.drain()

    def shutdown(self) -> None:
        self._copies.clear()
