"""Items of requests: looked up in the store, encoded when missing or lost, and what they wait for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from triptych.base.errors import RETRY_AFTER, TriptychError, Unavailable
from triptych.base.log import short
from triptych.base.metrics import ProxyMetrics
from triptych.base.types import ItemPlan
from triptych.proxy.encoders.job import ItemSource
from triptych.proxy.encoders.job_runner import JobRunner
from triptych.proxy.events import EncodersBack, EncodersGone, LookedUp, RequestFailed, StoreEpoch
from triptych.proxy.ports import RequestEvents
from triptych.proxy.requests.request import InFlightRequest
from triptych.proxy.splitter import SplitItem
from triptych.proxy.workers import KnownWorkers
from triptych.registry.registry import StorePatience

logger = logging.getLogger(__name__)

#: How long the store may take to answer a look-up before the proxy goes on without it.
LOOK_UP_SECONDS = 1.0
#: As above for items whose plans are known: a PD worker may have them resident.
KNOWN_LOOK_UP_SECONDS = 0.5


class StoreView(Protocol):
    """The embedding store's part that the proxy reads."""

    async def look_up(self, keys: Sequence[tuple[str, str]]) -> list[ItemPlan | None]: ...
    async def epoch(self) -> str: ...
    @property
    def clock_jumps(self) -> int: ...


class WorkLog(Protocol):
    """Log of the encoder work that the proxy starts."""

    def record(self, work: float, now: float, *, re_encode: bool) -> None: ...


class ItemSupply:
    """Finds the items of requests in the store, and has the others encoded."""

    def __init__(
        self,
        store: StoreView,
        jobs: JobRunner,
        log: WorkLog,
        metrics: ProxyMetrics,
        clock: Callable[[], float],
        skip_held_items: bool,
        pool: KnownWorkers,
    ) -> None:
        self._pool = pool
        self._patience = StorePatience()
        self._store = store
        self._jobs = jobs
        self._log = log
        self._metrics = metrics
        self._clock = clock
        self._skip_held_items = skip_held_items

    async def look_up(
        self,
        request: InFlightRequest,
        mm_hashes: Sequence[str],
        known_prefixes: Callable[[InFlightRequest], int],
    ) -> LookedUp:
        """The items that are stored, in one round trip, and those that a PD worker may hold.

        Where the store does not answer, none is stored: an encoder that reaches it looks there before it
        computes. A PD worker that was expected to hold an item says so or reports it missing.
        """
        request.looked_up = self._clock()
        answer = await self._stored(request, mm_hashes)
        if answer is None:
            return LookedUp({}, self._known(mm_hashes))
        plans, epoch = answer
        self._metrics.items.labels("store").inc(len(plans))
        missing = [key for key in mm_hashes if key not in plans]
        prefixes = known_prefixes(request) if missing and self._skip_held_items else 0
        expected = self._known(held_keys(request.content.items, missing, prefixes))
        if expected:
            logger.debug("request %s: its PD worker may hold %d items", request.name, len(expected))
        return LookedUp(plans, expected, epoch)

    def _known(self, mm_hashes: Collection[str]) -> dict[str, ItemPlan]:
        """The plans of items that were seen lately. A job that is under way is joined."""
        if not self._skip_held_items:
            return {}
        items = self._jobs.items
        plans = {key: items.plan(key) for key in mm_hashes if items.job(key) is None}
        return {key: plan for key, plan in plans.items() if plan is not None}

    async def _stored(
        self, request: InFlightRequest, mm_hashes: Sequence[str]
    ) -> tuple[Mapping[str, ItemPlan], StoreEpoch] | None:
        """The plans of stored items, and the store's epoch; None where it does not answer."""
        if not self._pool.store_ok:
            return None
        keys = [(key, request.bound.namespace) for key in mm_hashes]
        known = all(map(self._jobs.items.plan, mm_hashes))
        seconds = KNOWN_LOOK_UP_SECONDS if known else LOOK_UP_SECONDS
        try:
            async with self._patience.asked(seconds, hurry=self._pool.reads_direct):
                plans, epoch = await self._store.look_up(keys), await self._store.epoch()
        except (TriptychError, TimeoutError):
            return None
        for plan in plans:
            if plan is not None:
                self._jobs.items.learn(plan)
        stored = {plan.mm_hash: plan for plan in plans if plan is not None}
        return stored, (epoch, self._store.clock_jumps)

    def skip(self, request: InFlightRequest, mm_hash: str) -> None:
        """The request's PD worker holds the item: no encoder job is made."""
        logger.debug("request %s: no job for item %s", request.name, short(mm_hash), extra=request.log_extra)
        self._metrics.items.labels("pd").inc()
        self._metrics.skipped_jobs.labels("held").inc()

    def encode(
        self, request: InFlightRequest, mm_hashes: Sequence[str], *, expected: bool = False
    ) -> dict[str, str]:
        """Has items encoded that the store does not hold; `expected`: nor does their PD worker. Returns each
        item's origin."""
        if expected:
            logger.debug("request %s: its PD worker lacks %d items", request.name, len(mm_hashes))
            self._metrics.skipped_jobs.labels("missing").inc(len(mm_hashes))
        origins = {}
        for key in mm_hashes:
            work = self._jobs.start(_source(request, key))
            if work is not None:
                self._log.record(work, self._clock(), re_encode=False)
            origins[key] = "joined" if work is None else "encoded"
            self._metrics.items.labels(origins[key]).inc()
        return origins

    async def re_encode(
        self, request: InFlightRequest, mm_hashes: Sequence[str], damaged_digest: str, pause: float = 0.0
    ) -> None:
        """Has items encoded again, `pause` seconds from now, that a PD worker has not found.

        One that was stored in another epoch of the store (it was flushed or restarted), or before a jump of
        its clock (all that is stored expires), was not evicted: its loss says nothing about the PD workers'
        pace, and is logged as a first encode.
        """
        self._metrics.re_encodes.inc(len(mm_hashes))
        evicted = await self._evicted(request, mm_hashes)
        if pause:
            await asyncio.sleep(pause)
        for key in mm_hashes:
            if not request.lifecycle.ended:
                source = _source(request, key)
                work = self._jobs.start(source, re_encode=True, damaged_digest=damaged_digest)
                if work is not None:
                    self._log.record(work, self._clock(), re_encode=key in evicted)

    async def _evicted(self, request: InFlightRequest, mm_hashes: Sequence[str]) -> frozenset[str]:
        """Those of the lost items that were evicted, as far as the store answers. A PD worker that does not
        reach it reports what is there as missing."""
        if not self._pool.store_ok or not all(worker.reaches_store for worker in self._pool.serving("pd")):
            return frozenset()
        try:
            async with asyncio.timeout(LOOK_UP_SECONDS):
                epoch = await self._store.epoch()
        except (TriptychError, TimeoutError):
            return frozenset()
        now = (epoch, self._store.clock_jumps)
        items = request.lifecycle.items
        return frozenset(key for key in mm_hashes if epoch and items[key].stored_in in (None, now))


def held_keys(items: Sequence[SplitItem], missing: Collection[str], prefixes: int) -> set[str]:
    """Those `missing` items that a worker which has had the first `prefixes` prefixes of the request's chain
    need not have encoded again: every slot of the item lies in them."""
    return set(missing) - {item.mm_hash for item in items if item.prefix >= prefixes}


def _source(request: InFlightRequest, key: str) -> ItemSource:
    """What an encoder needs of the request's item with this key."""
    item = next(item for item in request.content.items if item.mm_hash == key)
    options = msgspec.json.encode(item.options, order="sorted").decode() if item.options else ""
    return ItemSource(
        mm_hash=key,
        namespace=request.bound.namespace,
        modality=item.modality,
        media=item.media,
        processor_options=options,
        salt=request.call.salt,
        request_id=request.request_id,
        label=request.call.label,
        deadline=request.deadline,
        looked_up=request.looked_up,
        tenant=request.call.tenant,
        priority=request.call.priority,
        model=request.call.model,
        trace=None if request.trace is None else request.trace.item(request.lifecycle.items[key]),
    )


#: Encoders that are away for less, as while they are started again, cost no attempt.
GRACE_SECONDS = 2.0


class EncoderShortage:
    """Looks only at requests while a namespace of theirs is served by no encoder."""

    def __init__(
        self,
        pool: KnownWorkers,
        requests: Mapping[str, InFlightRequest],
        events: RequestEvents,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._events = events
        self._clock = clock
        self._served: frozenset[str] = frozenset()
        self._since: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def pool_changed(self) -> None:
        """Encoders may have come or gone."""
        served = self._pool.namespaces_served()
        if served != self._served:
            self._served = served
            self._check()

    def lacking(self, request: InFlightRequest) -> None:
        """The request may hold memory at a PD worker for items that have to be encoded."""
        if self._timer is None and self._unserved(request) and request.lifecycle.lacks_items:
            self._check()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _unserved(self, request: InFlightRequest) -> bool:
        return request.binding is not None and request.binding.namespace not in self._served

    def _check(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock()
        for namespace in self._since.keys() & self._served:
            del self._since[namespace]
        lacking = False
        for request in list(self._requests.values()):
            if not request.lifecycle.lacks_items or request.binding is None:
                continue
            if not self._unserved(request):
                self._events.deliver(request.request_id, EncodersBack())
                continue
            lacking = True
            if now - self._since.setdefault(request.binding.namespace, now) >= GRACE_SECONDS:
                self._events.deliver(request.request_id, EncodersGone())
        if lacking:
            self._timer = asyncio.get_running_loop().call_later(GRACE_SECONDS / 2, self._check)


_POOLS = {"encoder": "encoder worker", "pd": "PD worker"}


class StoreWait:
    """One timer per request, only while all workers of a pool say that they do not reach the store."""

    def __init__(
        self,
        pool: KnownWorkers,
        requests: Mapping[str, InFlightRequest],
        events: RequestEvents,
        seconds: float,
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._events = events
        self._seconds = seconds
        self._lost: tuple[str, ...] = ()
        #: How many times the store was lost: a timer counts for one of them.
        self._losses = 0

    def pool_changed(self) -> None:
        """What workers say of the store may have changed."""
        before, self._lost = self._lost, tuple(filter(self._pool.store_lost, _POOLS))
        if self._lost and not before:
            self._losses += 1
            for request in self._requests.values():
                self.watch(request)

    def watch(self, request: InFlightRequest) -> None:
        """The request's items were looked up, or the store was lost to it."""
        # One whose media are still fetched is watched once its items have been looked up.
        if self._lost and request.split is not None and request.split.items:
            loop = asyncio.get_running_loop()
            loop.call_later(self._seconds, self._end, request.request_id, self._losses)

    def _end(self, request_id: str, losses: int) -> None:
        request = self._requests.get(request_id)
        if request is None or losses != self._losses or not self._lost or request.first_token is not None:
            return
        for pool in self._lost:
            if request.lifecycle.waits_for(pool):
                message = f"no {_POOLS[pool]} reaches the embedding store"
                error = Unavailable(message, retry_after=RETRY_AFTER)
                self._events.deliver(request_id, RequestFailed(error))
                return
        self.watch(request)
