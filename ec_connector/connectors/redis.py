"""The connector over the embedding store, a Redis or Valkey server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from triptych.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorWorker,
    ECTransferConfig,
    EncoderCacheMap,
)
from triptych.ec_connector.connectors.device_copy import DeviceCopier
from triptych.ec_connector.connectors.reports import Reports
from triptych.ec_connector.connectors.scheduler_role import TableScheduler
from triptych.ec_connector.connectors.store_client import StoreClient
from triptych.ec_connector.connectors.store_loads import StoreLoads
from triptych.ec_connector.connectors.store_saves import StoreSaves
from triptych.ec_connector.metadata import TransferMetadata


class RedisConnectorScheduler(TableScheduler):
    """The scheduler role, which needs no connection to the store."""


class RedisConnectorWorker(ECConnectorWorker):
    """The worker role: transfers run in an event loop of their own, or in the `loop` given.

    It connects at the first transfer: a store that is down fails transfers, not the worker's start.
    """

    def __init__(
        self,
        config: ECTransferConfig,
        on_progress: Callable[[], None] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, on_progress)
        self._reports = Reports(self.on_progress)
        self._client = StoreClient(config.store_url, loop)
        copier = DeviceCopier(config.device)
        self._loads = StoreLoads(config, self._client, copier, self._reports)
        self._saves = StoreSaves(config, self._client, copier, self._reports)
        self._encoder_cache: EncoderCacheMap = {}

    def start_load_caches(self, metadata: ECConnectorMetadata, encoder_cache: EncoderCacheMap) -> None:
        if not isinstance(metadata, TransferMetadata):
            raise TypeError(f"the redis connector needs TransferMetadata, not {type(metadata).__name__}")
        self._encoder_cache = encoder_cache
        for load_id in metadata.drops:
            self._loads.drop(load_id)
        for fetch in metadata.fetches:
            if self.config.is_consumer:
                self._loads.begin(fetch)
            else:
                self._reports.not_loaded_by_a_producer(fetch.load_id)
        for load_id in metadata.moves:
            self._loads.move(load_id, encoder_cache)

    def save_caches(self, encoder_cache: EncoderCacheMap, mm_hash: str, damaged_digest: str = "") -> None:
        if self.config.is_producer:
            self._saves.begin(encoder_cache, mm_hash, damaged_digest)
        else:
            self._reports.not_saved_by_a_consumer(mm_hash)

    def get_finished(self) -> ECConnectorOutput:
        self._loads.put_arrived(self._encoder_cache)
        return self._reports.drain()

    @property
    def host_bytes(self) -> int:
        """Bytes of all host copies, complete or being received."""
        return self._loads.host_bytes

    def shutdown(self) -> None:
        if self._client.closed:
            return
        self._client.closed = True
        self._loads.cancel()
        self._saves.cancel()
        self._client.close()
        self._loads.close()
