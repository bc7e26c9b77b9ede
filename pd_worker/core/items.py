"""The embeddings of requests, from the promise of room to the last row: admission, cache and connector.

An item that stands in the prompt is consumed row by row; one without a span (`length` 0) is consumed once its
cross table is written. Where the table is here already, nothing of the item is loaded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from triptych.ec_connector.base import ECConnectorOutput, ECConnectorScheduler, Presence
from triptych.errors import InvalidRequest, RequestError, Unavailable
from triptych.pd_worker.core.admission import Admission, distinct_bytes
from triptych.pd_worker.core.encoder_cache import EncoderCache, Residency
from triptych.pd_worker.core.kv_cache.cross_manager import CrossKVManager, TableState
from triptych.pd_worker.core.outputs import (
    EngineEvent,
    GatheredRows,
    ItemLoaded,
    ItemMissing,
    Projection,
    SchedulerOutput,
)
from triptych.pd_worker.core.request import RequestState
from triptych.types import MMFeature, Placement

#: Seconds that moving a landed host copy into the encoder cache may take.
MOVE_TIMEOUT = 10.0


class Sought(enum.Enum):
    """Whether a request has the items that it needs."""

    #: All are here, or on their way from the host copy.
    HERE = enum.auto()
    #: Some are not.
    WAITS = enum.auto()
    #: Some are not, and one of them has a host copy but no room in the encoder cache.
    NO_ROOM = enum.auto()


@dataclass(slots=True)
class ItemCounts:
    """Where items were found, since the last `take`."""

    resident: int = 0
    fetched: int = 0
    missing: int = 0
    load_seconds: list[float] = field(default_factory=list)
    load_bytes: int = 0


class ItemTracker:
    """Answers the scheduler's questions about items; the only one that changes the three parts."""

    def __init__(
        self,
        cache: EncoderCache,
        admission: Admission,
        connector: ECConnectorScheduler,
        cross: CrossKVManager | None = None,
    ) -> None:
        self.cache = cache
        self.admission = admission
        self.connector = connector
        self.cross = cross
        self._counts = ItemCounts()

    def contradiction(self, state: RequestState) -> RequestError | None:
        """The error of a request that says another plan of an item than what is known of its key.

        Whoever is here first is believed until the store has been asked, so that nobody's embedding is
        read by another's sizes, and nobody's blocks are computed at another's positions.
        """
        for feature in state.features:
            resident = self.cache.plan_of(feature.mm_hash)
            if resident is not None and resident != feature.plan:
                return InvalidRequest("an item's plan is not that of its stored embedding", param="items")
            table = None if self.cross is None else self.cross.plan_of(feature.mm_hash)
            if table is not None and table != feature.plan:
                return InvalidRequest("an item's plan is not that of its stored embedding", param="items")
            loading = self.connector.plan_of(feature.mm_hash)
            if loading is not None and loading != feature.plan:
                return Unavailable("another request names an item with another plan", retry_after=1.0)
        return None

    def admit(self, state: RequestState) -> bool:
        """Promises room for all items that are still to be loaded, or nothing."""
        features = [
            feature
            for index, feature in enumerate(state.features)
            if index not in state.consumed and not self.has_table(feature)
        ]
        if not self.admission.reserve(state.request_id, distinct_bytes(features)):
            return False
        if features:
            self.connector.add_request(state)
        return True

    def keeps_room(self, state: RequestState) -> bool:
        """False when the cross table for which no room was promised has gone since."""
        if self.cross is None:
            return True
        feature = state.request.cross
        return (
            feature is None
            or 0 in state.consumed
            or self.has_table(feature)
            or self.admission.holds(state.request_id, feature.mm_hash)
        )

    def has_table(self, feature: MMFeature) -> bool:
        """The item's cross table is here, in the making, or in host memory."""
        return (
            self.cross is not None
            and feature.placement.length == 0
            and self.cross.state(feature.plan) is not TableState.ABSENT
        )

    def table_is_leaving(self, state: RequestState) -> bool:
        """The request's cross table is on its way to host memory, where nobody can read it yet."""
        feature = state.request.cross
        return (
            self.cross is not None
            and feature is not None
            and self.cross.state(feature.plan) is TableState.LEAVING
        )

    def cross_cost(self, state: RequestState) -> int:
        """Free blocks that the request's cross table takes when it starts."""
        feature = state.request.cross
        return 0 if self.cross is None or feature is None else self.cross.cost(feature.plan)

    def hold_table(self, state: RequestState) -> bool:
        """Refers to the request's cross table where there is one."""
        feature = state.request.cross
        if self.cross is None or feature is None:
            return False
        return self.cross.acquire(state.request_id, feature.plan)

    def make_table(self, state: RequestState, output: SchedulerOutput) -> Projection | None:
        """Writes into the step's work what makes the cross table of a request that holds none.

        The projection, where there is one: its embedding is READY. The caller has seen to it that the blocks
        are free.
        """
        feature = state.request.cross
        if self.cross is None or feature is None:
            return None
        if self.cross.state(feature.plan) is TableState.SWAPPED:
            output.swap_in += self.cross.restore(state.request_id, feature.plan)
            output.restored.append(feature.mm_hash)
            return None
        blocks = self.cross.begin(state.request_id, feature.plan)
        projection = Projection(feature.mm_hash, feature.plan.rows, blocks)
        output.projections.append(projection)
        return projection

    def tables_made(self, output: SchedulerOutput) -> None:
        """The step that made these tables is over."""
        if self.cross is not None:
            for mm_hash in output.made_tables:
                self.cross.commit(mm_hash)

    def tables_lost(self, keys: Iterable[str]) -> None:
        """These tables could not be written: nobody refers to them any more."""
        if self.cross is not None:
            for mm_hash in keys:
                self.cross.fail(mm_hash)

    def drop_table(self, state: RequestState) -> None:
        """Takes the reference to the cross table back. Idempotent."""
        if self.cross is not None:
            self.cross.release(state.request_id)

    def cross_blocks(self, state: RequestState) -> tuple[int, ...]:
        """The request's cross table; empty while it is not written, and without a cross item."""
        return () if self.cross is None else self.cross.table(state.request_id)

    def is_resident(self, state: RequestState) -> bool:
        """The embeddings of all items that are still to be projected are in the encoder cache."""
        feature = state.request.cross
        return (
            feature is None or self.has_table(feature) or self.cache.state(feature.mm_hash) is Residency.READY
        )

    def seek(self, state: RequestState, start: int, now: float) -> Sought:
        """Takes references to, or starts the loads of, all items needed from token `start` on.

        Only for admitted requests.
        """
        if not self.keeps_room(state):
            return Sought.WAITS
        sought = Sought.HERE
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
                sought = Sought.NO_ROOM
            elif sought is Sought.HERE:
                sought = Sought.WAITS
        return sought

    def needed(self, state: RequestState, start: int) -> Iterator[int]:
        """Indices of items with rows at or after token `start`, not consumed yet; no table has them."""
        for index, feature in enumerate(state.features):
            if index in state.consumed:
                continue
            placement = feature.placement
            if placement.length == 0:
                if not self.has_table(feature):
                    yield index
                continue
            first, last = placement.embeds_in(start - placement.offset, placement.length)
            if first < last:
                yield index

    def _load(
        self, state: RequestState, index: int, residency: Residency, presence: Presence, now: float
    ) -> bool:
        plan = state.features[index].plan
        if presence is Presence.HIT and residency is Residency.ABSENT:
            holder = (state.request_id, index)
            if self.cache.reserve(holder, plan, now + MOVE_TIMEOUT):
                self.connector.update_state_after_alloc(state, index)
                return True
        elif presence is not Presence.HIT and plan.mm_hash in state.stored:
            state.stored.discard(plan.mm_hash)
            self.connector.item_ready(plan.mm_hash)
        return False

    def stop_before_missing(self, state: RequestState, start: int, end: int) -> int:
        """The end of the longest chunk from `start` up to `end` whose items are all READY."""
        if self.cross is not None and not self.cross.table(state.request_id):
            return start
        for index in self.needed(state, start):
            feature = state.features[index]
            first, last = rows_between(feature.placement, start, end)
            if first < last and self.cache.acquire((state.request_id, index), feature.plan) is not (
                Residency.READY
            ):
                end = max(start, feature.placement.offset)
        return end

    def consume(self, state: RequestState) -> None:
        """Releases the items whose last row is in acknowledged blocks."""
        if len(state.consumed) == len(state.features):
            return
        for index, feature in enumerate(state.features):
            if index not in state.consumed and self._is_consumed(state, feature):
                state.consumed.add(index)
                self.cache.release((state.request_id, index))
                self.connector.release(state.request_id, feature.mm_hash)
                if not any(
                    other.mm_hash == feature.mm_hash and i not in state.consumed
                    for i, other in enumerate(state.features)
                ):
                    self.admission.release(state.request_id, feature.mm_hash)

    def _is_consumed(self, state: RequestState, feature: MMFeature) -> bool:
        if feature.placement.length == 0:
            return bool(self.cross_blocks(state))
        return feature.placement.end <= state.num_computed_tokens

    def preempt(self, state: RequestState, *, swapped: bool = False) -> bool:
        """Releases all references; True when the request still has, or again got, room for all its items.

        A swapped request keeps what it has of items in its prompt: it goes on where it stopped.
        Otherwise it has given back what it held, so that two such requests never wait for each other.
        """
        if swapped and self.cross is None:
            return True
        self.drop_table(state)
        self.cache.release_request(state.request_id)
        state.stored.update(state.features[index].mm_hash for index in state.consumed)
        state.consumed.clear()
        if self.admit(state):
            return True
        self.admission.release_request(state.request_id)
        self.connector.request_finished(state)
        state.stored.update(feature.mm_hash for feature in state.features)
        return False

    def finish(self, state: RequestState) -> None:
        """Releases everything. Idempotent."""
        self.drop_table(state)
        self.cache.release_request(state.request_id)
        self.admission.release_request(state.request_id)
        self.connector.request_finished(state)

    def found(self, state: RequestState) -> list[EngineEvent]:
        """ItemLoaded for items that cost no load: resident, or covered by a prefix hit."""
        events: list[EngineEvent] = []
        for index, feature in enumerate(state.features):
            key = feature.mm_hash
            if key in state.loaded:
                continue
            resident = self.has_table(feature) or self.cache.state(key) is Residency.READY
            if index in state.consumed or resident:
                self._counts.resident += 1
                events.append(self._loaded(state, key, 0.0))
        return events

    def update(
        self, output: ECConnectorOutput, naming: Callable[[str], Iterable[RequestState]]
    ) -> list[EngineEvent]:
        """Takes in what the connector has finished; tells every holder of a key about it.

        `naming` gives the requests that name a key.
        """
        for key in output.loaded:
            self.cache.commit(key)
        for failure in output.failed:
            self.cache.fail(failure.mm_hash)
        self.connector.update_connector_output(output)
        events: list[EngineEvent] = []
        for key, seconds in output.fetched.items():
            events.extend(self._arrived(key, seconds, naming(key)))
        digests = {failure.mm_hash: failure.damaged_digest for failure in output.failed}
        for key, digest in digests.items():
            events.extend(self._missing(key, digest, naming(key)))
        return events

    def take_counts(self) -> ItemCounts:
        counts, self._counts = self._counts, ItemCounts()
        return counts

    def _arrived(self, key: str, seconds: float, states: Iterable[RequestState]) -> Iterator[EngineEvent]:
        self._counts.fetched += 1
        self._counts.load_seconds.append(seconds)
        nbytes = 0
        for state in states:
            if not state.admitted:
                continue
            nbytes = next(feature.plan.nbytes for feature in state.features if feature.mm_hash == key)
            if key not in state.loaded:
                yield self._loaded(state, key, seconds)
        self._counts.load_bytes += nbytes

    def _missing(self, key: str, digest: str, states: Iterable[RequestState]) -> Iterator[EngineEvent]:
        """Tells those that do not know of the loss. Who knows waits for the item to be encoded again.

        A request may come with news from before the loss, and so begin a load that can but fail.
        """
        missing = False
        for state in states:
            index = next(i for i, f in enumerate(state.features) if f.mm_hash == key)
            if not state.admitted or self.connector.has_caches(state)[index] is not Presence.MISS:
                continue
            missing = True
            state.stored.discard(key)
            state.loaded.discard(key)
            if key not in state.lost:
                state.lost.add(key)
                yield ItemMissing(**state.request.names(), mm_hash=key, damaged_digest=digest)
        if missing:
            self._counts.missing += 1
            self.connector.item_missing_reported(key)

    def _loaded(self, state: RequestState, key: str, seconds: float) -> ItemLoaded:
        state.loaded.add(key)
        state.lost.discard(key)
        return ItemLoaded(**state.request.names(), mm_hash=key, seconds=seconds)


def rows_between(placement: Placement, start: int, end: int) -> tuple[int, int]:
    """Rows [a, b) of the item that prompt tokens [start, end) consume."""
    return placement.embeds_in(start - placement.offset, end - placement.offset)


def gather_rows(state: RequestState, start: int, end: int) -> tuple[GatheredRows, ...]:
    """Which rows go to which tokens of the chunk [start, end), one entry per stretch."""
    gathered: list[GatheredRows] = []
    for feature in state.features:
        placement = feature.placement
        row = 0
        for first, count in placement.runs or ((0, placement.length),):
            lo = max(start, placement.offset + first)
            hi = min(end, placement.offset + first + count)
            if lo < hi:
                skipped = lo - placement.offset - first
                gathered.append(GatheredRows(feature.mm_hash, row + skipped, hi - lo, lo - start))
            row += count
    return tuple(gathered)
