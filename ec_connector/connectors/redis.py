"""The connector over the embedding store, a Redis or Valkey server."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch

from triptych.base.errors import TriptychError
from triptych.base.log import log_fields, short
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorWorker,
    ECTransferConfig,
    EncoderCacheMap,
    EncoderOutput,
)
from triptych.ec_connector.connectors.direct_path import NotFiniteError, ServedOutputs
from triptych.ec_connector.connectors.host_buffers import DeviceCopier, bytes_of
from triptych.ec_connector.connectors.output_server import OutputServer
from triptych.ec_connector.connectors.scheduler_role import TableScheduler
from triptych.ec_connector.connectors.store_client import StoreClient
from triptych.ec_connector.connectors.store_loads import StoreLoads
from triptych.ec_connector.metadata import Reports, TransferMetadata
from triptych.store import codec

logger = logging.getLogger(__name__)


#: Bytes that are copied and hashed in the event loop, in about a millisecond: a thread begins no earlier.
_INLINE_BYTES = 8 << 20
#: Seconds that a save leaves to the first reader of an embedding that is served.
_FIRST_READ = 0.1


class StoreSaves:
    """The running saves, one per key; each keeps its tensor alive until it ends."""

    def __init__(
        self,
        config: ECTransferConfig,
        client: StoreClient,
        copier: DeviceCopier,
        reports: Reports,
        served: ServedOutputs | None = None,
    ) -> None:
        self._config = config
        self._client = client
        self._copier = copier
        self._reports = reports
        self._lock = threading.Lock()
        self._saves: dict[str, Future[None]] = {}
        self._served = served

    def begin(self, encoder_cache: EncoderCacheMap, mm_hash: str, damaged_digest: str) -> None:
        """Starts the save of an entry, unless one of its key is running."""
        entry = encoder_cache[mm_hash]
        if self._served is not None and (output := self._served.get(entry.plan)) is not None:
            self._reports.offered(mm_hash, output.source)  # without a way through the save's thread
        with self._lock:
            if mm_hash in self._saves:
                return
            try:
                host = self._copier.to_host(entry.data)
            except Exception as error:
                logger.exception(
                    "copy of %s to the host failed", short(mm_hash), extra=log_fields(mm_hash=mm_hash)
                )
                self._reports.unsaved(mm_hash, f"copy to the host failed: {error}")
                return
            saving = self._client.submit(self._save(entry, host, damaged_digest))
            self._saves[mm_hash] = saving
        saving.add_done_callback(lambda done: self._forget(mm_hash, done))

    def serve(self, output: EncoderOutput) -> bool | None:
        """As the connector's: in the engine's thread."""
        plan = output.plan
        if self._served is None or self._served.get(plan) is not None:
            return None
        try:
            head = codec.PendingHead(plan, ttl=self._config.ttl, producer=self._producer(plan.mm_hash))
            return True if self._served.offer(plan, head, bytes_of(output.data)) is not None else None
        except NotFiniteError:
            return False

    def _producer(self, mm_hash: str) -> bytes:
        return b"" if self._config.producers is None else self._config.producers.raw(mm_hash)

    def _offer(self, plan: ItemPlan, body: memoryview) -> bytes:
        """The head of the value, after the output was offered to PD workers: they need not wait for the save.

        Where that fails, they have it once it is saved. InvalidRequest when the plan cannot be stored.
        """
        served, output = self._served, None
        ttl, producer = self._config.ttl, self._producer(plan.mm_hash)
        try:
            if served is not None and (output := served.get(plan)) is None:
                output = served.offer(plan, codec.PendingHead(plan, ttl=ttl, producer=producer), body)
                if output is not None:
                    self._reports.offered(plan.mm_hash, output.source)
        except Exception as error:
            extra = log_fields(mm_hash=plan.mm_hash)
            logger.warning("%s is not served: %r", short(plan.mm_hash), error, extra=extra)
        return codec.encode_head(plan, body, ttl=ttl, producer=producer) if output is None else output.head

    async def _save(self, entry: EncoderOutput, host: torch.Tensor, damaged_digest: str) -> None:
        mm_hash, config, direct = entry.plan.mm_hash, self._config, self._config.direct
        try:
            body = bytes_of(host)
            served = self._served is not None and self._served.get(entry.plan) is not None
            inline = served or len(body) <= _INLINE_BYTES
            offer = partial(self._offer, entry.plan, body)
            head = offer() if inline else await asyncio.to_thread(offer)
            if self._served is not None and (read := self._served.first_read(mm_hash)) is not None:
                # The save would compete with the reader that waits for its first token.
                await asyncio.wait([asyncio.wrap_future(read)], timeout=_FIRST_READ)
            if direct is not None and not direct.reaches_store():
                self._fail(mm_hash, "this process does not reach the store")
                return
            async with asyncio.timeout(config.save_timeout):
                store = await self._client.store()
                await store.save(
                    entry.plan,
                    body,
                    ttl=config.ttl,
                    damaged_digest=damaged_digest,
                    head=head,
                    tenant=entry.tenant,
                )
        except TimeoutError:
            self._fail(mm_hash, f"not stored within {config.save_timeout:g} s")
        except TriptychError as error:
            self._fail(mm_hash, str(error))
        except Exception as error:
            logger.exception("save of %s failed", short(mm_hash), extra=log_fields(mm_hash=mm_hash))
            self._fail(mm_hash, f"unexpected: {error!r}")
        else:
            self._forget(mm_hash)
            if self._served is not None:
                self._served.stored(mm_hash)
            self._reports.saved(mm_hash)

    def _fail(self, mm_hash: str, reason: str) -> None:
        self._forget(mm_hash)
        logger.warning("%s is not saved: %s", short(mm_hash), reason, extra=log_fields(mm_hash=mm_hash))
        self._reports.unsaved(mm_hash, reason)

    def _forget(self, mm_hash: str, done: Future[None] | None = None) -> None:
        """Removes a save: before its report, so that the engine may save again at once, and once `done`."""
        with self._lock:
            if done is None or self._saves.get(mm_hash) is done:
                self._saves.pop(mm_hash, None)

    def cancel(self) -> None:
        """Cancels all saves."""
        for saving in self._saves.copy().values():
            saving.cancel()


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
        self._server: OutputServer | None = None
        if config.direct is not None and config.direct.memory and config.is_producer:
            self._server = OutputServer(config.direct)
            self._client.submit(self._server.start())
        served = None if self._server is None else self._server.outputs
        self._loads = StoreLoads(config, self._client, copier, self._reports)
        self._saves = StoreSaves(config, self._client, copier, self._reports, served)
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

    def serve(self, output: EncoderOutput) -> bool | None:
        return self._saves.serve(output) if self.config.is_producer else None

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
        self._client.close(self._end_direct)
        self._loads.close()

    async def _end_direct(self) -> None:
        """Closes what is open beside the store, in the loop."""
        self._loads.disconnect()
        if self._server is not None:
            await self._server.close()
