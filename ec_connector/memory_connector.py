"""The in-process connector: a dictionary for a store. For unit tests and one-process topologies."""

from __future__ import annotations

from collections.abc import Callable

from triptych.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorWorker,
    ECTransferConfig,
    EncoderCacheMap,
    EncoderOutput,
)
from triptych.ec_connector.metadata import HostCopy, TransferMetadata
from triptych.ec_connector.reports import Reports
from triptych.ec_connector.table_scheduler import TableScheduler

#: One dictionary per `store_url`, shared by all connectors of this process.
_STORES: dict[str, dict[str, EncoderOutput]] = {}


def memory_store(url: str) -> dict[str, EncoderOutput]:
    """The items by mm_hash that connectors with this `store_url` share."""
    return _STORES.setdefault(url, {})


class MemoryConnectorScheduler(TableScheduler):
    """As with any store."""


class MemoryConnectorWorker(ECConnectorWorker):
    """Every transfer has finished when its call returns."""

    def __init__(self, config: ECTransferConfig, on_progress: Callable[[], None] | None = None) -> None:
        super().__init__(config, on_progress)
        self._store = memory_store(config.store_url)
        self._reports = Reports(self.on_progress)
        self._copies: dict[HostCopy, EncoderOutput] = {}

    def start_load_caches(self, metadata: ECConnectorMetadata, encoder_cache: EncoderCacheMap) -> None:
        if not isinstance(metadata, TransferMetadata):
            raise TypeError(f"this connector takes TransferMetadata, not {type(metadata).__name__}")
        for copy in metadata.drops:
            self._copies.pop(copy, None)
            self._reports.forget(copy)
        for fetch in metadata.fetches:
            copy = HostCopy(fetch.plan.mm_hash, fetch.generation)
            entry = self._store.get(copy.mm_hash)
            if not self.config.is_consumer:
                self._reports.not_loaded_by_a_producer(copy)
            elif entry is None:
                self._reports.failed(copy, "no such key")
            else:
                self._copies[copy] = entry
                self._reports.fetched(copy, 0.0)
        for copy in metadata.moves:
            if copy.mm_hash not in encoder_cache and copy not in self._copies:
                self._reports.failed(copy, "its host copy is gone")
                continue
            if copy.mm_hash not in encoder_cache:
                encoder_cache[copy.mm_hash] = self._copies[copy]
            self._reports.loaded(copy)

    def save_caches(self, encoder_cache: EncoderCacheMap, mm_hash: str, damaged_digest: str = "") -> None:
        if not self.config.is_producer:
            self._reports.not_saved_by_a_consumer(mm_hash)
            return
        self._store.setdefault(mm_hash, encoder_cache[mm_hash])
        self._reports.saved(mm_hash)

    def get_finished(self) -> ECConnectorOutput:
        return self._reports.drain()

    def shutdown(self) -> None:
        self._copies.clear()
