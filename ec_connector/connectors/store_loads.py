"""Loads from the store, in an event loop of their own, into host copies and the encoder cache."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from triptych.base.log import log_fields, short
from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.ec_connector.base import ECTransferConfig, EncoderCacheMap, EncoderOutput
from triptych.ec_connector.connectors.direct_path import DirectLoads
from triptych.ec_connector.connectors.host_buffers import (
    DeviceCopier,
    HostBuffer,
    HostMemory,
    PinnedMemory,
    PinnedPool,
)
from triptych.ec_connector.connectors.store_client import StoreClient
from triptych.ec_connector.metadata import Fetch, LoadId, Reports
from triptych.store.bulk import Loaded, LoadResult, Missing, ScatterBuffer
from triptych.store.control import StoreRefused, StoreUnavailable

logger = logging.getLogger(__name__)

#: How long an item that its encoder worker serves may still be on its way into the store, and how often it is
#: looked for there.
SAVING_SECONDS, SAVED_POLL_SECONDS = 2.0, 0.05
#: How often a load from the store looks whether that is out of reach.
REACH_POLL_SECONDS = 0.1
#: A second load of a key within this ends its requests when the store gives no answer.
UNANSWERED_SECONDS = 10.0


@dataclass(slots=True)
class _ItemLoad:
    """One load, from its fetch order to its drop."""

    id: LoadId
    plan: ItemPlan
    source: EmbeddingSource | None = None
    task: Future[None] | None = None
    #: The host copy, once it is complete.
    host: HostBuffer | None = None
    #: Running copies to the device that read the host copy.
    moving: int = 0
    #: The host copy is not needed any more.
    dropped: bool = False


class StoreLoads:
    """The running loads and their host copies, one per key."""

    def __init__(
        self, config: ECTransferConfig, client: StoreClient, copier: DeviceCopier, reports: Reports
    ) -> None:
        self._client = client
        self._copier = copier
        self._reports = reports
        self._timeout = config.load_timeout
        self._producers = config.producers
        self._direct = config.direct
        self._direct_loads = None if config.direct is None else DirectLoads(config.direct)
        #: Keys that were reported missing since the store gave no answer.
        self._unanswered: dict[str, float] = {}
        self._pool: PinnedPool | None = None
        if not copier.device.on_host and config.is_consumer:
            self._pool = PinnedPool(PinnedMemory(config.host_buffer_bytes, copier.device))
        self._memory = HostMemory(config.host_buffer_bytes, self._pool)
        self._lock = threading.Lock()
        self._loads: dict[str, _ItemLoad] = {}
        self._moves: set[Future[None]] = set()
        #: Items that are complete on the device and not in the encoder cache yet.
        self._arrived: deque[tuple[LoadId, EncoderOutput]] = deque()

    @property
    def host_bytes(self) -> int:
        """Bytes of all host copies, complete or being received."""
        return self._memory.used

    def begin(self, fetch: Fetch) -> None:
        """Starts a fetch; replaces an older load of its key."""
        load = _ItemLoad(fetch.load_id, fetch.plan, fetch.source)
        if self._client.closed:
            self._reports.failed(load.id, "the connector is shut down")
            return
        with self._lock:
            before = self._loads.pop(fetch.plan.mm_hash, None)
            self._loads[fetch.plan.mm_hash] = load
            load.task = self._client.submit(self._fetch(load))
        if before is not None:
            self._end(before)

    async def _fetch(self, load: _ItemLoad) -> None:
        """Fetches one item into host memory, which belongs to the load if it succeeds."""
        need, limit = load.plan.nbytes, self._memory.limit
        if need > limit:
            self._fail(load, f"needs {need} bytes of host memory, the limit is {limit}")
            return
        try:
            buffer = await self._memory.acquire(need)
        except (MemoryError, RuntimeError) as error:
            self._fail(load, f"no host memory: {error}")
            return
        kept = False
        try:
            kept = await self._receive(load, buffer)
        finally:
            if not kept:
                self._memory.release(buffer)

    async def _receive(self, load: _ItemLoad, buffer: HostBuffer) -> bool:
        """Receives the item into `buffer`; whether that is now the load's host copy."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                result, path = await self._result(load, ScatterBuffer(buffer.views()))
        except StoreUnavailable as error:
            unreachable = not isinstance(error, StoreRefused) and self._gives_up(load.plan.mm_hash)
            return self._fail(load, str(error), unreachable=unreachable)
        except TimeoutError:
            unreachable = self._gives_up(load.plan.mm_hash)
            return self._fail(load, f"no value within {self._timeout:g} s", unreachable=unreachable)
        except Exception as error:
            logger.exception(
                "load of %s failed", short(load.plan.mm_hash), extra=log_fields(mm_hash=load.plan.mm_hash)
            )
            return self._fail(load, f"unexpected: {error!r}")
        if isinstance(result, Missing):
            return self._fail(load, result.reason, result.damaged_digest)
        with self._lock:
            if self._loads.get(load.plan.mm_hash) is not load:
                return False
            load.host = buffer
        if self._producers is not None:
            self._producers.note(load.plan.mm_hash, result.producer)
        self._reports.fetched(load.id, time.perf_counter() - began, path)
        return True

    async def _result(self, load: _ItemLoad, body: ScatterBuffer) -> tuple[LoadResult, str]:
        """The item by the first path that has it. An encoder worker that serves it may still be saving it:
        what the store lacks then, it may get."""
        plan, source = load.plan, load.source
        if source is None or self._direct_loads is None:
            return await self._stored(plan, body), "store"
        result, path = await self._direct_loads.load(plan, source, body)
        if isinstance(result, Loaded):
            return result, path
        last = time.monotonic() + SAVING_SECONDS
        while True:
            result = await self._stored(plan, body)
            if isinstance(result, Loaded) or result.damaged_digest or time.monotonic() > last:
                return result, "store"
            await asyncio.sleep(SAVED_POLL_SECONDS)

    async def _stored(self, plan: ItemPlan, body: ScatterBuffer) -> LoadResult:
        """The store's answer; StoreUnavailable also as soon as this process is known not to reach it."""
        loading = asyncio.ensure_future(self._from_store(plan, body))
        try:
            while self._direct is None or self._direct.reaches_store():
                timeout = None if self._direct is None else REACH_POLL_SECONDS
                if (await asyncio.wait([loading], timeout=timeout))[0]:
                    return loading.result()
            raise StoreUnavailable("this process does not reach the store")
        finally:
            if not loading.done():
                loading.cancel()
                await asyncio.wait([loading])

    async def _from_store(self, plan: ItemPlan, body: ScatterBuffer) -> LoadResult:
        store = await self._client.store()
        return await store.load(plan, lambda nbytes: body)

    def _gives_up(self, mm_hash: str) -> bool:
        """Whether a load that the store has not answered ends its requests here. Where encoder workers are
        read from, the item is first reported as missing, and encoded again."""
        if self._direct is None:
            return True
        now = time.monotonic()
        recent = {key: at for key, at in self._unanswered.items() if at > now - UNANSWERED_SECONDS}
        self._unanswered = {**recent, mm_hash: now}
        return mm_hash in recent

    def _fail(
        self, load: _ItemLoad, reason: str, damaged_digest: str = "", *, unreachable: bool = False
    ) -> bool:
        """Reports the load as failed, unless it was dropped; always False."""
        with self._lock:
            if self._loads.get(load.plan.mm_hash) is not load:
                return False
            del self._loads[load.plan.mm_hash]
        logger.info(
            "load of %s failed: %s",
            short(load.plan.mm_hash),
            reason,
            extra=log_fields(mm_hash=load.plan.mm_hash),
        )
        self._reports.failed(load.id, reason, damaged_digest, unreachable=unreachable)
        return False

    def move(self, load_id: LoadId, encoder_cache: EncoderCacheMap) -> None:
        """Copies a host copy to the device; the item enters the encoder cache once it is complete there."""
        if load_id.mm_hash in encoder_cache:
            self._reports.loaded(load_id)
            return
        with self._lock:
            load = self._loads.get(load_id.mm_hash)
            host = load.host if load is not None and load.id == load_id else None
            if load is not None and host is not None:
                load.moving += 1
        if load is None or host is None:
            self._reports.failed(load_id, "its host copy is gone")
            return
        try:
            tensor, wait = self._copier.to_device(host.pieces, load.plan)
            output = EncoderOutput(load.plan, tensor)
            if wait is not None:
                moving = self._client.submit(self._finish_move(load, output, wait))
                self._moves.add(moving)
                moving.add_done_callback(self._moves.discard)
                return
        except Exception as error:
            self._not_moved(load, error)
        else:
            encoder_cache[load_id.mm_hash] = output
            self._reports.loaded(load_id)
        self._moved(load)

    async def _finish_move(self, load: _ItemLoad, output: EncoderOutput, wait: Callable[[], None]) -> None:
        """Waits until the copy to the device is complete."""
        try:
            await asyncio.to_thread(wait)
        except Exception as error:
            self._not_moved(load, error)
        else:
            self._arrived.append((load.id, output))
            self._reports.on_progress()
        finally:
            self._moved(load)

    def _not_moved(self, load: _ItemLoad, error: Exception) -> None:
        logger.error(
            "copy of %s to the device failed",
            short(load.plan.mm_hash),
            exc_info=error,
            extra=log_fields(mm_hash=load.plan.mm_hash),
        )
        self._reports.not_moved(load.id, error)

    def _moved(self, load: _ItemLoad) -> None:
        """A copy to the device has ended, successfully or not."""
        with self._lock:
            load.moving -= 1
        self._release(load)

    def put_arrived(self, encoder_cache: EncoderCacheMap) -> None:
        """Puts items that are complete on the device into the encoder cache."""
        while self._arrived:
            load_id, output = self._arrived.popleft()
            encoder_cache[load_id.mm_hash] = output
            self._reports.loaded(load_id)

    def drop(self, load_id: LoadId) -> None:
        """Frees the load's host copy; a running fetch is cancelled and frees its memory."""
        with self._lock:
            load = self._loads.get(load_id.mm_hash)
            if load is not None and load.id == load_id:
                del self._loads[load_id.mm_hash]
            else:
                load = None
            self._reports.forget(load_id)
        if load is not None:
            self._end(load)

    def _end(self, load: _ItemLoad) -> None:
        """Ends a load that was removed from the table."""
        with self._lock:
            load.dropped = True
        if load.host is None and load.task is not None:
            load.task.cancel()
        self._release(load)

    def _release(self, load: _ItemLoad) -> None:
        """Frees the host copy once it is dropped and no copy to the device reads it."""
        with self._lock:
            if not load.dropped or load.moving or load.host is None:
                return
            host, load.host = load.host, None
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its memory with it
            self._client.call_soon(self._memory.release, host)

    def cancel(self) -> None:
        """Cancels all fetches and moves, and forgets all host copies."""
        with self._lock:
            fetches = [load.task for load in self._loads.values()]
            self._loads.clear()
        for task in (*fetches, *self._moves.copy()):
            if task is not None:
                task.cancel()

    def disconnect(self) -> None:
        """Closes the connections to encoder workers; called in the loop."""
        if self._direct_loads is not None:
            self._direct_loads.close()

    def close(self) -> None:
        """Frees page-locked memory, after the last transfer has ended."""
        if self._pool is not None:
            self._copier.drain()
            self._pool.close()
