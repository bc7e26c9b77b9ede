"""The connector over the embedding store: fetches into host copies, moves, and saves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

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
from triptych.ec_connector.connectors.host_buffers import HostBuffer, HostMemory, bytes_of
from triptych.ec_connector.connectors.loop_thread import LoopThread
from triptych.ec_connector.connectors.pinned_memory import PinnedMemory, PinnedPool
from triptych.ec_connector.connectors.reports import Reports
from triptych.ec_connector.connectors.scheduler_role import TableScheduler
from triptych.ec_connector.metadata import Fetch, HostCopy, TransferMetadata
from triptych.ec_connector.store.embedding_store import EmbeddingStore, Missing, StoreUnavailable
from triptych.errors import TriptychError
from triptych.log import short
from triptych.types import ItemPlan

logger = logging.getLogger(__name__)


class RedisConnectorScheduler(TableScheduler):
    """Decides from its table; knows nothing of the store."""


@dataclass(slots=True)
class _Load:
    """A load from its fetch order to its drop."""

    copy: HostCopy
    plan: ItemPlan
    task: Future[None] | None = None
    #: The host copy, once it has landed.
    host: HostBuffer | None = None
    #: Copies to the device that read the host copy.
    moving: int = 0
    #: Nobody needs the host copy any more.
    dropped: bool = False


class RedisConnectorWorker(ECConnectorWorker):
    """Transfers run in an event loop of their own, or in the `loop` given.

    Connects at the first transfer: a store that is down fails transfers, not the worker.
    """

    def __init__(
        self,
        config: ECTransferConfig,
        on_progress: Callable[[], None] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, on_progress)
        self._reports = Reports(self.on_progress)
        self._copier = DeviceCopier(config.device)
        self._pool: PinnedPool | None = None
        if self._copier.is_cuda and config.is_consumer:
            self._pool = PinnedPool(PinnedMemory(config.host_buffer_bytes, lock=True))
        self._memory = HostMemory(config.host_buffer_bytes, self._pool)
        self._lock = threading.Lock()
        self._loads: dict[str, _Load] = {}
        self._saves: dict[str, Future[None]] = {}
        self._moves: set[Future[None]] = set()
        #: Items that are whole on the device and not in the encoder cache yet.
        self._arrived: deque[tuple[HostCopy, EncoderOutput]] = deque()
        self._encoder_cache: EncoderCacheMap = {}
        self._store: EmbeddingStore | None = None
        self._connecting = asyncio.Lock()
        self._closed = False
        self._loop = LoopThread("ec-transfers", loop)

    def start_load_caches(self, metadata: ECConnectorMetadata, encoder_cache: EncoderCacheMap) -> None:
        if not isinstance(metadata, TransferMetadata):
            raise TypeError(f"this connector takes TransferMetadata, not {type(metadata).__name__}")
        self._encoder_cache = encoder_cache
        for copy in metadata.drops:
            self._drop(copy)
        for fetch in metadata.fetches:
            self._begin(fetch)
        for copy in metadata.moves:
            self._move(copy, encoder_cache)

    def _drop(self, copy: HostCopy) -> None:
        """The load's host copy is not needed any more; one under way is cancelled and gives back its room."""
        with self._lock:
            load = self._loads.get(copy.mm_hash)
            if load is not None and load.copy == copy:
                del self._loads[copy.mm_hash]
            else:
                load = None
            self._reports.forget(copy)
        if load is not None:
            self._end(load)

    def _end(self, load: _Load) -> None:
        """The load is in the table no more."""
        with self._lock:
            load.dropped = True
        if load.host is None and load.task is not None:
            load.task.cancel()
        self._release(load)

    def _release(self, load: _Load) -> None:
        """Gives the host copy's memory back once it is dropped and no copy to the device reads it."""
        with self._lock:
            if not load.dropped or load.moving or load.host is None:
                return
            host, load.host = load.host, None
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its memory with it
            self._loop.loop.call_soon_threadsafe(self._memory.give, host)

    def _begin(self, fetch: Fetch) -> None:
        load = _Load(HostCopy(fetch.plan.mm_hash, fetch.generation), fetch.plan)
        if not self.config.is_consumer:
            self._reports.not_loaded_by_a_producer(load.copy)
            return
        if self._closed:
            self._reports.failed(load.copy, "the connector is shut down")
            return
        with self._lock:
            before = self._loads.pop(fetch.plan.mm_hash, None)
            self._loads[fetch.plan.mm_hash] = load
            load.task = self._submit(self._fetch(load))
        if before is not None:
            self._end(before)

    def _submit(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        if self._closed:
            work.close()
            raise StoreUnavailable("the connector is shut down")
        return self._loop.submit(work)

    async def _fetch(self, load: _Load) -> None:
        """Brings one item into host memory. Its memory is kept with the copy, and given back otherwise."""
        need, limit = load.plan.nbytes, self._memory.budget.limit
        if need > limit:
            self._fail(load, f"needs {need} bytes of host memory, the limit is {limit}")
            return
        try:
            buffer = await self._memory.take(need)
        except (MemoryError, RuntimeError) as error:
            self._fail(load, f"no host memory: {error}")
            return
        kept = False
        try:
            kept = await self._receive(load, buffer)
        finally:
            if not kept:
                self._memory.give(buffer)

    async def _receive(self, load: _Load, buffer: HostBuffer) -> bool:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self.config.load_timeout):
                result = await (await self._connected()).load(load.plan, lambda nbytes: buffer.memory())
        except StoreUnavailable as error:
            return self._fail(load, str(error))
        except TimeoutError:
            return self._fail(load, f"no value within {self.config.load_timeout:g} s")
        except Exception as error:
            logger.exception("load of %s failed", short(load.plan.mm_hash))
            return self._fail(load, f"unexpected: {error!r}")
        if isinstance(result, Missing):
            return self._fail(load, result.reason, result.damaged_digest)
        with self._lock:
            if self._loads.get(load.plan.mm_hash) is not load:
                return False
            load.host = buffer
        self._reports.fetched(load.copy, time.perf_counter() - began)
        return True

    def _fail(self, load: _Load, reason: str, damaged_digest: str = "") -> bool:
        with self._lock:
            if self._loads.get(load.plan.mm_hash) is not load:
                return False
            del self._loads[load.plan.mm_hash]
        logger.info("load of %s failed: %s", short(load.plan.mm_hash), reason)
        self._reports.failed(load.copy, reason, damaged_digest)
        return False

    def _move(self, copy: HostCopy, encoder_cache: EncoderCacheMap) -> None:
        if copy.mm_hash in encoder_cache:
            self._reports.loaded(copy)
            return
        with self._lock:
            load = self._loads.get(copy.mm_hash)
            host = load.host if load is not None and load.copy == copy else None
            if load is not None and host is not None:
                load.moving += 1
        if load is None or host is None:
            self._reports.failed(copy, "its host copy is gone")
            return
        try:
            tensor, wait = self._copier.to_device(host.pieces, load.plan)
            output = EncoderOutput(load.plan, tensor)
            if wait is not None:
                moving = self._submit(self._finish_move(load, output, wait))
                self._moves.add(moving)
                moving.add_done_callback(self._moves.discard)
                return
        except Exception as error:
            self._not_moved(load, error)
        else:
            encoder_cache[copy.mm_hash] = output
            self._reports.loaded(copy)
        self._moved(load)

    async def _finish_move(self, load: _Load, output: EncoderOutput, wait: Callable[[], None]) -> None:
        """Waits until the device has it; only then is it in the encoder cache, and only there its tensor."""
        try:
            await asyncio.to_thread(wait)
        except Exception as error:
            self._not_moved(load, error)
        else:
            self._arrived.append((load.copy, output))
            self.on_progress()
        finally:
            self._moved(load)

    def _not_moved(self, load: _Load, error: Exception) -> None:
        logger.error("copy of %s to the device failed", short(load.plan.mm_hash), exc_info=error)
        self._reports.failed(load.copy, f"copy to the device failed: {error}")

    def _moved(self, load: _Load) -> None:
        """A copy to the device has ended, however it did."""
        with self._lock:
            load.moving -= 1
        self._release(load)

    def save_caches(self, encoder_cache: EncoderCacheMap, mm_hash: str, damaged_digest: str = "") -> None:
        if not self.config.is_producer:
            self._reports.not_saved_by_a_consumer(mm_hash)
            return
        entry = encoder_cache[mm_hash]
        with self._lock:
            if mm_hash in self._saves:
                return
            try:
                host = self._copier.to_host(entry.data)
            except Exception as error:
                logger.exception("copy of %s to the host failed", short(mm_hash))
                self._reports.unsaved(mm_hash, f"copy to the host failed: {error}")
                return
            saving = self._submit(self._save(entry, host, damaged_digest))
            self._saves[mm_hash] = saving
        saving.add_done_callback(lambda done: self._forget_save(mm_hash, done))

    def _forget_save(self, mm_hash: str, done: Future[None] | None = None) -> None:
        """Called before its report, so that the engine may save again at once, and with `done` at its end."""
        with self._lock:
            if done is None or self._saves.get(mm_hash) is done:
                self._saves.pop(mm_hash, None)

    async def _save(self, entry: EncoderOutput, host: torch.Tensor, damaged_digest: str) -> None:
        mm_hash = entry.plan.mm_hash
        try:
            async with asyncio.timeout(self.config.save_timeout):
                store = await self._connected()
                await store.save(
                    entry.plan, bytes_of(host), ttl=self.config.ttl, damaged_digest=damaged_digest
                )
        except TimeoutError:
            self._unsaved(mm_hash, f"not stored within {self.config.save_timeout:g} s")
        except TriptychError as error:
            self._unsaved(mm_hash, str(error))
        except Exception as error:
            logger.exception("save of %s failed", short(mm_hash))
            self._unsaved(mm_hash, f"unexpected: {error!r}")
        else:
            self._forget_save(mm_hash)
            self._reports.saved(mm_hash)

    def _unsaved(self, mm_hash: str, reason: str) -> None:
        self._forget_save(mm_hash)
        logger.warning("%s is not saved: %s", short(mm_hash), reason)
        self._reports.unsaved(mm_hash, reason)

    async def _connected(self) -> EmbeddingStore:
        async with self._connecting:
            if self._store is None:
                self._store = await EmbeddingStore.connect(self.config.store_url)
            return self._store

    def get_finished(self) -> ECConnectorOutput:
        while self._arrived:
            copy, output = self._arrived.popleft()
            self._encoder_cache[copy.mm_hash] = output
            self._reports.loaded(copy)
        return self._reports.drain()

    @property
    def host_bytes(self) -> int:
        """Bytes that host copies, landed or under way, take."""
        return self._memory.budget.used

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._lock:
            loads = [load.task for load in self._loads.values()]
            self._loads.clear()
        for task in (*loads, *self._saves.copy().values(), *self._moves.copy()):
            if task is not None:
                task.cancel()
        self._loop.stop(self._disconnect())
        if self._pool is not None:
            self._copier.drain()
            self._pool.close()

    async def _disconnect(self) -> None:
        async with self._connecting:
            if self._store is not None:
                await self._store.close()
