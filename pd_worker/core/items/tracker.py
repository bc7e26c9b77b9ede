"""The items of requests: reservations of their bytes, loads, and release after the last row.

An item with a placeholder is consumed row by row; a cross item (`length` 0) is consumed once its cross table
is written. Where the table exists already, the embedding is not loaded.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator

from triptych.base.errors import InvalidRequest, RequestError, Unavailable
from triptych.base.types import ItemPlan, MMFeature
from triptych.ec_connector.base import ECConnectorMetadata, ECConnectorOutput, ECConnectorScheduler, Presence
from triptych.pd_worker.core import request_events
from triptych.pd_worker.core.admission import Admission, distinct_bytes
from triptych.pd_worker.core.encoder_cache import EncoderCache, Residency
from triptych.pd_worker.core.items.item import ItemStatus, ItemUse
from triptych.pd_worker.core.kv_cache.block_pool import BlockPool
from triptych.pd_worker.core.kv_cache.cross_kv_manager import CrossKVManager, TableState
from triptych.pd_worker.core.outputs import ItemStats, Projection, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest, RequestState, RequestTable
from triptych.protos.pd_pb2 import RequestEvent

#: Timeout in seconds of moving a fetched host copy into the encoder cache.
MOVE_TIMEOUT = 10.0
#: Moves of an item that may fail in succession, one a step, since the device has no memory.
MAX_MOVES = 16


class Readiness(enum.Enum):
    """Whether a request has the items that it needs."""

    #: All are resident, or are being moved from their host copies.
    READY = enum.auto()
    #: Some are not.
    WAITING = enum.auto()
    #: Some are not, and one of them has a host copy but no room in the encoder cache.
    NO_SPACE = enum.auto()


class ItemTracker:
    """Admission, encoder cache, connector and cross tables, kept consistent with each other.

    Without `cross` no request has a cross item, and without a connector none has an item.
    """

    def __init__(
        self,
        cache: EncoderCache,
        admission: Admission,
        connector: ECConnectorScheduler | None,
        cross: CrossKVManager | None = None,
    ) -> None:
        self.cache = cache
        self.admission = admission
        self._connector = connector
        self.cross = cross or CrossKVManager(BlockPool(0), 1)
        self.table = self.cross.items
        self._stats = ItemStats()
        #: Moves to the device of each key that failed in succession, since the device had no memory.
        self._no_memory = Counter[str]()

    @property
    def connector(self) -> ECConnectorScheduler:
        """The connector of items; RuntimeError without one."""
        if self._connector is None:
            raise RuntimeError("this engine has no EC connector")
        return self._connector

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest when the request's items could never be resident together, or be loaded."""
        if request.features and self._connector is None:
            raise InvalidRequest(
                "this engine loads no items: send text, or configure a transfer", param="items"
            )
        self.admission.check(request.features)

    def contradiction(self, state: RequestState) -> RequestError | None:
        """The error of a request whose plan of an item differs from the known plan of its key.

        Until the store has been read the first request's plan counts, so that no embedding is read with the
        sizes of another plan, and no blocks are computed at the positions of another plan.
        """
        for feature in state.features:
            for known in (self.cache.plan_of(feature.mm_hash), self.cross.plan_of(feature.mm_hash)):
                if known is not None and known != feature.plan:
                    return InvalidRequest("an item's plan is not that of its stored embedding", param="items")
            loading = self.connector.plan_of(feature.mm_hash)
            if loading is not None and loading != feature.plan:
                return Unavailable("another request names an item with another plan", retry_after=1.0)
        return None

    def admit(self, state: RequestState) -> bool:
        """Reserves room for all items that are still to be loaded, or for none."""
        features = [
            feature
            for index, feature in enumerate(state.features)
            if not state.is_consumed(index) and not self.has_table(feature.plan)
        ]
        if not self.admission.reserve(state.request_id, distinct_bytes(features)):
            return False
        if features:
            self.connector.add_request(state)
        return True

    def keeps_room(self, state: RequestState) -> bool:
        """False when no room was reserved for the item because of a cross table that has gone since."""
        feature = state.cross
        return (
            feature is None
            or not state.unconsumed
            or self.has_table(feature.plan)
            or self.admission.holds(state.request_id, feature.mm_hash)
        )

    def has_table(self, plan: ItemPlan) -> bool:
        """The item's cross table is in the KV cache, is being written, or is in host memory."""
        return plan.length == 0 and self.cross.state(plan) is not TableState.ABSENT

    def changed_tables(self) -> list[str]:
        """Items whose cross table has come or gone since the last call."""
        changed: list[str] = []
        for item in self.table:
            use = next(iter(item.uses.values()), None)
            has_table = use is not None and self.has_table(use.plan)
            if has_table is not item.had_table:
                item.had_table = has_table
                changed.append(item.mm_hash)
        return changed

    def can_attend(self, state: RequestState) -> bool:
        """The request's cross table can be read in this step, or projected from a resident embedding."""
        if (feature := state.cross) is None:
            return True
        table = self.cross.state(feature.plan)
        if table is TableState.ABSENT:
            return self.cache.state(feature.mm_hash) is Residency.READY
        return table is not TableState.LEAVING

    def write_table(self, state: RequestState, output: SchedulerOutput) -> Projection | None:
        """Schedules what writes the cross table of a request without one: a projection, or copies.

        A projection's embedding is READY. The caller has made sure that the blocks are free.
        """
        feature = state.cross
        if feature is None or self.cross.acquire(state.request_id, feature.plan):
            return None
        if self.cross.state(feature.plan) is TableState.SWAPPED:
            output.swap_in += self.cross.restore(state.request_id, feature.plan)
            output.restored.append(feature.mm_hash)
            return None
        blocks = self.cross.begin(state.request_id, feature.plan)
        projection = Projection(feature.mm_hash, feature.plan.rows, blocks)
        output.projections.append(projection)
        return projection

    def last_table(self, state: RequestState) -> tuple[ItemPlan | None, tuple[int, ...]]:
        """Plan and blocks of a written cross table that only this request has a reference to."""
        feature, table = state.cross, self.cross.last_held(state.request_id)
        return (feature.plan, table) if feature is not None and table else (None, ())

    def awaiting_tables(self, output: SchedulerOutput, running: Iterable[RequestState]) -> list[RequestState]:
        """Running requests whose cross table is written in this step."""
        keys = output.written_tables
        if not keys:
            return []
        return [state for state in running if state.cross is not None and state.cross.mm_hash in keys]

    def end_projections(
        self, output: SchedulerOutput, running: Iterable[RequestState], failed: frozenset[str]
    ) -> list[RequestState]:
        """Marks the step's tables as written, except `failed` ones; the requests that need one of these."""
        self.cross.fail(failed)
        for mm_hash in output.written_tables:
            self.cross.commit(mm_hash)
        lost: list[RequestState] = []
        for state in self.awaiting_tables(output, running):
            if state.cross is not None and state.cross.mm_hash in failed:
                lost.append(state)
            else:
                self.consume(state)
        return lost

    def ensure_loading(self, state: RequestState, start: int, now: float) -> Readiness:
        """Acquires, or starts the loads of, all items needed from token `start` on.

        Only for admitted requests.
        """
        if not self.keeps_room(state):
            return Readiness.WAITING
        readiness = Readiness.READY
        presences: list[Presence] | None = None
        for index in self.needed(state, start):
            residency = self.cache.acquire((state.request_id, index), state.features[index].plan)
            if residency in (Residency.READY, Residency.PENDING):
                continue
            if presences is None:
                presences = self.connector.has_caches(state)
            if self._load(state, index, residency, presences[index], now):
                continue
            if presences[index] is Presence.HIT:
                readiness = Readiness.NO_SPACE
            elif readiness is Readiness.READY:
                readiness = Readiness.WAITING
        return readiness

    def needed(self, state: RequestState, start: int) -> Iterator[int]:
        """Indices of items that are not consumed, with rows at or after token `start`, or without a table."""
        for index, feature in enumerate(state.features):
            if index not in state.items[index].unconsumed:
                continue
            placement = feature.placement
            if placement.length == 0:
                if not self.has_table(feature.plan):
                    yield index
                continue
            first, last = placement.embeds_in(start - placement.offset, placement.length)
            if first < last:
                yield index

    def _load(
        self, state: RequestState, index: int, residency: Residency, presence: Presence, now: float
    ) -> bool:
        plan, use = state.features[index].plan, state.items[index]
        if presence is Presence.HIT and residency is Residency.ABSENT:
            holder = (state.request_id, index)
            if self.cache.reserve(holder, plan, now + MOVE_TIMEOUT):
                self.connector.update_state_after_alloc(state, index)
                return True
        elif presence is not Presence.HIT and use.status is ItemStatus.STORED:
            use.status = ItemStatus.MARKED
            self.connector.item_ready(plan.mm_hash)
        return False

    def stop_before_missing(self, state: RequestState, start: int, end: int) -> int:
        """The end of the longest chunk from `start` up to `end` whose items are all READY."""
        if state.cross is not None and not self.cross.table(state.request_id):
            return start
        for index in self.needed(state, start):
            feature = state.features[index]
            placement = feature.placement
            first, last = placement.embeds_in(start - placement.offset, end - placement.offset)
            if first < last and self.cache.acquire((state.request_id, index), feature.plan) is not (
                Residency.READY
            ):
                end = max(start, placement.offset)
        return end

    def consume(self, state: RequestState) -> None:
        """Releases the items whose last row is in acknowledged blocks."""
        if not state.unconsumed:
            return
        for index, feature in enumerate(state.features):
            use = state.items[index]
            if index in use.unconsumed and self._is_consumed(state, feature):
                use.unconsumed.discard(index)
                state.unconsumed -= 1
                self.cache.release((state.request_id, index))
                self.connector.release(state.request_id, feature.mm_hash)
                if not use.unconsumed:
                    self.admission.release(state.request_id, feature.mm_hash)

    def _is_consumed(self, state: RequestState, feature: MMFeature) -> bool:
        if feature.placement.length == 0:
            return bool(self.cross.table(state.request_id))
        return feature.placement.end <= state.num_computed_tokens

    def preempt(self, state: RequestState, *, swapped: bool = False) -> bool:
        """Releases all references; True when room for all items is still reserved, or is again.

        A swapped request keeps its prompt's items: it goes on where it stopped. Any other gives everything
        back, so that two such requests never wait for each other. A paused one reserves nothing.
        """
        swapped = swapped and state.cross is None
        if swapped and not state.paused:
            return True
        self.cross.release(state.request_id)
        self.cache.release_request(state.request_id)
        for index, use in enumerate(state.items):
            if state.is_consumed(index):
                use.load_again()
                if not swapped:
                    use.unconsumed.add(index)
                    state.unconsumed += 1
        if not state.paused and self.admit(state):
            return True
        self.admission.release_request(state.request_id)
        if self._connector is not None:
            self._connector.request_finished(state)
        for use in state.items:
            use.load_again()
        return False

    def put_off(self, state: RequestState) -> None:
        """Releases all that an admitted request holds, before a row of it is used: it is admitted anew."""
        self.cache.release_request(state.request_id)
        self.admission.release_request(state.request_id)
        self.connector.request_finished(state)
        for use in state.items:
            use.put_off()
        self._stats.put_off += 1

    def finish(self, state: RequestState) -> None:
        """Releases everything. Idempotent."""
        self.cross.release(state.request_id)
        self.cache.release_request(state.request_id)
        self.admission.release_request(state.request_id)
        if self._connector is not None:
            self._connector.request_finished(state)
        for feature in state.features:
            del self._no_memory[feature.mm_hash]

    def report_resident(self, state: RequestState) -> list[RequestEvent]:
        """ItemLoaded events of items that needed no load: resident, or covered by a prefix hit."""
        events: list[RequestEvent] = []
        for index, feature in enumerate(state.features):
            use = state.items[index]
            if use.loaded:
                continue
            resident = self.has_table(use.plan) or self.cache.state(feature.mm_hash) is Residency.READY
            if resident or state.is_consumed(index):
                self._stats.resident += 1
                events.append(self._loaded(state, use, 0.0))
        return events

    def update(self, output: ECConnectorOutput, requests: RequestTable) -> list[RequestEvent]:
        """Applies the connector's report; the events of every request that names one of its keys."""
        for key in output.loaded:
            self.cache.commit(key)
            del self._no_memory[key]
        for failure in output.failed:
            self.cache.fail(failure.mm_hash)
            if failure.no_memory:
                self._no_memory[failure.mm_hash] += 1
                self.cache.evict_idle()
        if self._connector is not None:
            self._connector.update_connector_output(output)
        events: list[RequestEvent] = []
        for key, seconds in output.fetched.items():
            path = output.paths.get(key, "store")
            events.extend(self._arrived(key, seconds, path, requests.with_item(key)))
        digests = {failure.mm_hash: failure.damaged_digest for failure in output.missing}
        for key, digest in digests.items():
            events.extend(self._missing(key, digest, requests.with_item(key)))
        return events

    def unmovable(self) -> list[str]:
        """Keys that MAX_MOVES moves in succession found no device memory for; drains them."""
        keys = [key for key, moves in self._no_memory.items() if moves >= MAX_MOVES]
        for key in keys:
            del self._no_memory[key]
        return keys

    def build_metadata(self, output: SchedulerOutput) -> ECConnectorMetadata | None:
        """The step's work for the connector's worker role; writes the evicted keys into `output`."""
        output.evicted = self.cache.drain_evicted()
        return None if self._connector is None else self._connector.build_connector_meta(output)

    def collect_stats(self) -> ItemStats:
        """Figures for metrics; those since the last report are drained."""
        stats, self._stats = self._stats, ItemStats()
        stats.cross_tables = self.cross.num_tables
        stats.encoder_cache_bytes = self.cache.used
        stats.encoder_cache_references = self.cache.references
        stats.reserved_bytes = self.admission.reserved
        return stats

    def _arrived(
        self, key: str, seconds: float, path: str, states: Iterable[RequestState]
    ) -> Iterator[RequestEvent]:
        self._stats.fetched += 1
        self._stats.loads[path] += 1
        self._stats.load_seconds.append(seconds)
        nbytes = 0
        for state in states:
            if not state.admitted:
                continue
            use = next(use for use in state.items if use.plan.mm_hash == key)
            nbytes = use.plan.nbytes
            if not use.loaded:
                yield self._loaded(state, use, seconds, path)
        self._stats.load_bytes += nbytes

    def _missing(self, key: str, digest: str, states: Iterable[RequestState]) -> Iterator[RequestEvent]:
        """ItemMissing events for requests without one; the rest wait for the item to be encoded again.

        A request that was sent before the loss may still begin a load, which fails.
        """
        missing = False
        for state in states:
            index = next(i for i, f in enumerate(state.features) if f.mm_hash == key)
            if not state.admitted or self.connector.has_caches(state)[index] is not Presence.MISS:
                continue
            missing = True
            if state.items[index].lose():
                yield request_events.item_missing(state, key, digest)
        if missing:
            self._stats.missing += 1
            self.connector.item_missing_reported(key)

    def _loaded(self, state: RequestState, use: ItemUse, seconds: float, path: str = "") -> RequestEvent:
        use.arrive()
        return request_events.item_loaded(state, use.plan.mm_hash, seconds, path)
