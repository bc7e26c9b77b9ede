"""The in-process connector: for the colocated topology's only replica, and for unit tests."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from triptych.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorWorker,
    ECTransferConfig,
    EncoderCacheMap,
    EncoderOutput,
)
from triptych.ec_connector.connectors.device_copy import DeviceCopier
from triptych.ec_connector.connectors.memory_store import MemoryStore
from triptych.ec_connector.connectors.reports import Reports
from triptych.ec_connector.connectors.scheduler_role import TableScheduler
from triptych.ec_connector.metadata import Fetch, HostCopy, TransferMetadata
from triptych.log import short

logger = logging.getLogger(__name__)


class MemoryConnectorScheduler(TableScheduler):
    """As with any store."""


class MemoryConnectorWorker(ECConnectorWorker):
    """Transfers to and from the `MemoryStore` of its config; ValueError for a config without one.

    Every transfer has finished when its call returns. On a CPU nothing is copied.
    """

    def __init__(self, config: ECTransferConfig, on_progress: Callable[[], None] | None = None) -> None:
        super().__init__(config, on_progress)
        if not isinstance(config.store, MemoryStore):
            raise ValueError("the memory connector needs a store: ECTransferConfig(store=MemoryStore())")
        self._store = config.store
        self._reports = Reports(self.on_progress)
        self._copies: dict[HostCopy, EncoderOutput] = {}
        self._copier = DeviceCopier(config.device)

    def start_load_caches(self, metadata: ECConnectorMetadata, encoder_cache: EncoderCacheMap) -> None:
        if not isinstance(metadata, TransferMetadata):
            raise TypeError(f"this connector takes TransferMetadata, not {type(metadata).__name__}")
        for copy in metadata.drops:
            self._copies.pop(copy, None)
            self._reports.forget(copy)
        for fetch in metadata.fetches:
            self._fetch(fetch)
        for copy in metadata.moves:
            self._move(copy, encoder_cache)

    def _fetch(self, fetch: Fetch) -> None:
        copy = HostCopy(fetch.plan.mm_hash, fetch.generation)
        if not self.config.is_consumer:
            self._reports.not_loaded_by_a_producer(copy)
            return
        entry = self._store.load(fetch.plan)
        if entry is None:
            self._reports.failed(copy, "no such key, or stored with another plan")
            return
        self._copies[copy] = entry
        self._reports.fetched(copy, 0.0)

    def _move(self, copy: HostCopy, encoder_cache: EncoderCacheMap) -> None:
        if copy.mm_hash not in encoder_cache:
            entry = self._copies.get(copy)
            if entry is None:
                self._reports.failed(copy, "its host copy is gone")
                return
            try:
                encoder_cache[copy.mm_hash] = self._on_device(entry)
            except Exception as error:
                logger.exception("copy of %s to the device failed", short(copy.mm_hash))
                self._reports.failed(copy, f"copy to the device failed: {error}")
                return
        self._reports.loaded(copy)

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
