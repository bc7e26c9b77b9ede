"""The item stage of a step's schedule: admits waiting requests, and starts the loads of their items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from triptych.ec_connector.base import ECConnectorOutput, Presence
from triptych.errors import RequestError
from triptych.pd_worker.core import request_events
from triptych.pd_worker.core.encoder_cache import Residency
from triptych.pd_worker.core.items import ItemTracker, Readiness
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.kv_cache.prefix_chain import PrefixChain
from triptych.pd_worker.core.kv_cache.swap import SwapManager
from triptych.pd_worker.core.overlap_prefill import OverlapPrefill
from triptych.pd_worker.core.request import EngineRequest, RequestState, RequestStatus
from triptych.pd_worker.core.request_events import EngineEvent, ItemMissing
from triptych.pd_worker.core.request_table import RequestTable
from triptych.pd_worker.core.waiting_requests import WaitingRequests

#: How long a ready mark counts, in seconds.
MARK_SECONDS = 10.0


class ReadyMarks:
    """Keys whose embeddings were stored in the last seconds.

    A ready mark may overtake the submission of a request that has the item as pending. Only recent marks
    matter: older ones are dropped.
    """

    def __init__(self) -> None:
        #: When each key's latest mark came, the oldest first.
        self._marks: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, mm_hashes: Iterable[str], now: float) -> None:
        """These embeddings are in the store."""
        marks = self._marks
        for key in mm_hashes:
            marks.pop(key, None)
            marks[key] = now
        while marks and not self._counts(marks[oldest := next(iter(marks))], now):
            del marks[oldest]

    def drop(self, mm_hash: str) -> None:
        """The embedding is not in the store any more."""
        self._marks.pop(mm_hash, None)

    def has(self, mm_hash: str, now: float) -> bool:
        """Whether a mark for the key counts now."""
        at = self._marks.get(mm_hash)
        return at is not None and self._counts(at, now)

    def _counts(self, at: float, now: float) -> bool:
        return at > now - MARK_SECONDS


class ItemStage:
    """Admission in the order of arrival, then loads: for all waiting requests that may have changed.

    Without `cross_items` no request has a cross table.
    """

    def __init__(
        self,
        requests: RequestTable,
        waiting: WaitingRequests,
        items: ItemTracker,
        kv: KVCacheManager,
        swap: SwapManager,
        overlap: OverlapPrefill,
        *,
        cross_items: bool,
    ) -> None:
        self._requests = requests
        self._waiting = waiting
        self._items = items
        self._kv = kv
        self._swap = swap
        self._overlap = overlap
        self._cross_items = cross_items
        self._marks = ReadyMarks()
        #: Keys of requests whose cross table existed at the last step.
        self._tables: set[str] = set()

    def new_state(self, request: EngineRequest, now: float) -> RequestState:
        """The state of a new request, with its items that are known to be in the store."""
        chain = PrefixChain(
            request.prefix_root,
            request.prompt_token_ids,
            request.output_token_ids,
            request.features,
            self._kv.block_size,
        )
        keys = {feature.mm_hash for feature in request.features}
        stored = {key for key in keys if key in request.ready or self._marks.has(key, now)}
        return RequestState(request, chain, stored=stored, unencoded=keys & request.unencoded - stored)

    def mark_ready(self, mm_hashes: Iterable[str], now: float) -> None:
        """These embeddings are in the store; counts also for requests that are submitted shortly after."""
        keys = set(mm_hashes)
        self._marks.add(keys, now)
        for key in keys:
            for state in self._requests.with_item(key):
                state.stored.add(key)
                state.unencoded.discard(key)
                state.lost.discard(key)
        self._recheck(keys)

    def update(self, moved: ECConnectorOutput) -> list[EngineEvent]:
        """Applies the connector's report of the step; the events that follow from it."""
        events = self._items.update(moved, self._requests.with_item)
        self._recheck((*moved.fetched, *moved.loaded, *(failure.mm_hash for failure in moved.failed)))
        for event in events:
            if isinstance(event, ItemMissing):
                self._marks.drop(event.mm_hash)
        return events

    def advance(
        self, running: Sequence[RequestState], now: float
    ) -> tuple[list[EngineEvent], list[tuple[RequestState, RequestError]]]:
        """Admits requests and starts loads; the events, and the requests that failed, with their errors."""
        if expired := self._items.expire(now):
            self._recheck(expired)
        self._recheck_tables()
        events, failed = self._admit(now)
        if changes := self._kv.drain_changes():
            self._waiting.recheck_prefixes(changes)
        for state in self._waiting.drain_changed():
            events += self._load(state, now)
        for state in running:
            if len(state.consumed) < len(state.features) and not state.is_decoding:
                # Starts it again where an earlier load has failed.
                self._items.ensure_loading(state, state.num_computed_tokens, now)
                events += self._report_unencoded(state, state.num_computed_tokens)
        return events, failed

    def known_prefix(self, state: RequestState) -> tuple[list[int], int]:
        """The cached blocks that the request would start with, and how many of its tokens they cover."""
        if swapped := self._swap.tokens(state.request_id):
            return [], swapped
        prefix = self._kv.find_prefix(state.chain, state.num_tokens)
        return prefix, len(prefix) * self._kv.block_size

    def lacking(self, state: RequestState) -> set[str]:
        """The items that an admitted request waits for: they have not come from the store."""
        start = state.num_computed_tokens or self.known_prefix(state)[1]
        presences = self._items.connector.has_caches(state)
        return {
            key
            for index in self._items.needed(state, start)
            if self._items.cache.state(key := state.features[index].mm_hash) is Residency.ABSENT
            and presences[index] is not Presence.HIT
        }

    def _recheck(self, keys: Iterable[str]) -> None:
        """Requests that wait for these items may be able to go on."""
        self._waiting.recheck(self._requests.with_any_item(keys))

    def _recheck_tables(self) -> None:
        """A new cross table makes a load superfluous; without its table a request may need room again."""
        if not self._cross_items:
            return
        tables = {key for key, feature in self._requests.features() if self._items.has_table(feature)}
        self._recheck(tables ^ self._tables)
        self._tables = tables
        for state in self._waiting.drain_changed():
            if not self._items.keeps_room(state):
                state.status = RequestStatus.WAITING_ROOM
            self._waiting.requeue(state)

    def _admit(self, now: float) -> tuple[list[EngineEvent], list[tuple[RequestState, RequestError]]]:
        """Media requests behind one that does not fit wait too."""
        events: list[EngineEvent] = []
        failed: list[tuple[RequestState, RequestError]] = []
        blocked = False
        while (state := self._waiting.first_for_room(text_only=blocked)) is not None:
            if (error := self._items.contradiction(state)) is not None:
                self._waiting.discard(state)
                failed.append((state, error))
                continue
            if not self._items.admit(state):
                blocked = True
                continue
            state.status = RequestStatus.WAITING_ITEMS
            self._waiting.requeue(state)
            if state.admitted_at is None:
                state.admitted_at = now
                events.append(request_events.admitted(state))
        return events, failed

    def _load(self, state: RequestState, now: float) -> list[EngineEvent]:
        prefix, num_computed = self.known_prefix(state)
        digests = self._kv.prefix_digests(state.chain, prefix, state.num_tokens)
        self._waiting.watch_prefix(state, digests)
        readiness = self._items.ensure_loading(state, num_computed, now)
        if readiness is Readiness.READY and state.items_at is None:
            state.items_at = now
            self._waiting.completed(state)
        self._waiting.set_readiness(state, readiness)
        self._overlap.examine(state, num_computed, readiness)
        return [*self._items.report_resident(state), *self._report_unencoded(state, num_computed)]

    def _report_unencoded(self, state: RequestState, start: int) -> list[EngineEvent]:
        """ItemMissing events of items that nobody encodes, and that tokens from `start` on need after all."""
        if not state.unencoded:
            return []
        needed = {state.features[index].mm_hash for index in self._items.needed(state, start)}
        absent = {key for key in needed if self._items.cache.state(key) is Residency.ABSENT}
        missing = sorted(state.unencoded & absent)
        state.unencoded.difference_update(missing)
        state.lost.update(missing)
        return [request_events.item_missing(state, key, "") for key in missing]
