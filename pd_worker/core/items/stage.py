"""The item stage of a step's schedule: admits waiting requests, and starts the loads of their items."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

from triptych.base.errors import RequestError
from triptych.ec_connector.base import ECConnectorOutput, Presence
from triptych.pd_worker.core import request_events
from triptych.pd_worker.core.admission import own_order_of
from triptych.pd_worker.core.chunks import OverlapPrefill
from triptych.pd_worker.core.encoder_cache import Residency
from triptych.pd_worker.core.items.item import ItemStatus
from triptych.pd_worker.core.items.tracker import ItemTracker, Readiness
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager, SwapManager
from triptych.pd_worker.core.request import EngineRequest, RequestState, RequestStatus, RequestTable
from triptych.pd_worker.core.tenant_turns import TenantTurns
from triptych.pd_worker.core.waiting_requests import WaitingRequests
from triptych.protos.pd_pb2 import RequestEvent


@dataclass(frozen=True, slots=True)
class ItemStage:
    """Admission in the order of arrival, then loads: for all waiting requests that may have changed.

    Without `cross_items` no request has a cross table.
    """

    requests: RequestTable
    waiting: WaitingRequests
    items: ItemTracker
    kv: KVCacheManager
    swap: SwapManager
    overlap: OverlapPrefill
    turns: TenantTurns
    _: KW_ONLY
    cross_items: bool

    def new_state(self, request: EngineRequest, now: float) -> RequestState:
        """The state of a new request, with its items that are known to be in the store."""
        chain = PrefixChain(
            request.prefix_root,
            request.prompt_token_ids,
            request.output_token_ids,
            request.features,
            self.kv.block_size,
            request.both_ways,
        )
        state = RequestState(request, chain)
        for use in state.items:
            if self.items.table.is_marked(use.plan.mm_hash, now):
                use.status = ItemStatus.STORED
        return state

    def mark_ready(self, mm_hashes: Iterable[str], now: float) -> None:
        """These embeddings are in the store; counts also for requests that are submitted shortly after."""
        keys = set(mm_hashes)
        self.items.table.mark(keys, now)
        self._recheck(keys)

    def update(self, moved: ECConnectorOutput) -> list[RequestEvent]:
        """Applies the connector's report of the step; the events that follow from it."""
        events = self.items.update(moved, self.requests)
        self._recheck((*moved.fetched, *moved.loaded, *(failure.mm_hash for failure in moved.failed)))
        for event in events:
            if event.HasField("item_missing"):
                self.items.table.unmark(event.item_missing.mm_hash)
        return events

    def advance(
        self, running: Sequence[RequestState], now: float
    ) -> tuple[list[RequestEvent], list[tuple[RequestState, RequestError]]]:
        """Admits requests and starts loads; the events, and the requests that failed, with their errors."""
        if expired := self.items.cache.expire(now):
            self._recheck(expired)
        self._recheck_tables()
        events, failed = self._admit(now)
        if changes := self.kv.drain_changes():
            self.waiting.recheck_prefixes(changes)
        for state in self.waiting.drain_changed():
            events += self._load(state, now)
        for state in running:
            if state.unconsumed and not state.is_decoding:
                # Starts it again where an earlier load has failed.
                self.items.ensure_loading(state, state.num_computed_tokens, now)
                events += self._report_unencoded(state, state.num_computed_tokens)
        return events, failed

    def known_prefix(self, state: RequestState) -> tuple[list[int], int]:
        """The cached blocks that the request would start with, and how many of its tokens they cover."""
        if swapped := self.swap.tokens(state.request_id):
            return [], swapped
        prefix = self.kv.find_prefix(state.chain, state.num_tokens)
        return prefix, len(prefix) * self.kv.block_size

    def lacking(self, state: RequestState) -> set[str]:
        """The items that an admitted request waits for: they have not come from the store."""
        start = state.num_computed_tokens or self.known_prefix(state)[1]
        presences = self.items.connector.has_caches(state)
        return {
            key
            for index in self.items.needed(state, start)
            if self.items.cache.state(key := state.features[index].mm_hash) is Residency.ABSENT
            and presences[index] is not Presence.HIT
        }

    def _recheck(self, keys: Iterable[str]) -> None:
        """Requests that wait for these items may be able to go on."""
        for key in keys:
            self.waiting.recheck(self.requests.with_item(key))

    def _recheck_tables(self) -> None:
        """A new cross table makes a load superfluous; without its table a request may need room again."""
        if not self.cross_items:
            return
        self._recheck(self.items.changed_tables())
        for state in self.waiting.drain_changed():
            if not self.items.keeps_room(state):
                state.status = RequestStatus.WAITING_ADMISSION
            self.waiting.requeue(state)

    def _admit(self, now: float) -> tuple[list[RequestEvent], list[tuple[RequestState, RequestError]]]:
        events: list[RequestEvent] = []
        failed: list[tuple[RequestState, RequestError]] = []
        for state, error in self.waiting.admit(self._take):
            if error is not None:
                self.waiting.discard(state)
                failed.append((state, error))
                continue
            state.status = RequestStatus.WAITING_ITEMS
            self.waiting.requeue(state)
            if state.admitted_at is None:
                state.admitted_at = now
                events.append(request_events.admitted(state))
        return events, failed

    def _take(self, state: RequestState) -> bool:
        if (error := self.items.contradiction(state)) is not None:
            raise error
        while not self.items.admit(state):
            if (other := self._gives_room(state)) is None:
                return False
            self.items.put_off(other)
            self.overlap.put_off(other)
            self.waiting.put_off(other)
        return True

    def _gives_room(self, state: RequestState) -> RequestState | None:
        """A waiting request that gives its items' room up for this one, whose tenant has room for none.

        It is the latest of the tenant with the most requests that run or have room, where that tenant keeps
        more than the other one has then: each goes on with its earliest, and room never goes to and fro.
        """
        if not self.turns.several:
            return None
        holding: dict[str, list[RequestState]] = {}
        for one in self.waiting:
            if self.items.admission.holds_any(one.request_id):
                holding.setdefault(one.tenant, []).append(one)
        if state.tenant in holding:
            return None
        # One that goes on from host memory keeps the items of its prompt.
        able = {
            t: [one for one in held if not self.swap.tokens(one.request_id)] for t, held in holding.items()
        }
        here = {t: len(held) + self.turns.running(t) for t, held in holding.items() if able[t]}
        most = max(here, key=lambda tenant: here[tenant], default=None)
        if most is None or here[most] <= self.turns.running(state.tenant) + 1:
            return None
        return max(able[most], key=own_order_of)

    def _load(self, state: RequestState, now: float) -> list[RequestEvent]:
        prefix, num_computed = self.known_prefix(state)
        digests = self.kv.prefix_digests(state.chain, prefix, state.num_tokens)
        self.waiting.watch_prefix(state, digests)
        readiness = self.items.ensure_loading(state, num_computed, now)
        if readiness is Readiness.READY and state.items_at is None:
            state.items_at = now
            self.waiting.completed(state)
        self.waiting.set_readiness(state, readiness)
        self.overlap.examine(state, num_computed, readiness)
        return [*self.items.report_resident(state), *self._report_unencoded(state, num_computed)]

    def _report_unencoded(self, state: RequestState, start: int) -> list[RequestEvent]:
        """ItemMissing events of items that nobody encodes, and that tokens from `start` on need after all."""
        if all(use.status is not ItemStatus.UNENCODED for use in state.items):
            return []
        return [
            request_events.item_missing(state, use.plan.mm_hash, "")
            for index in self.items.needed(state, start)
            if (use := state.items[index]).status is ItemStatus.UNENCODED
            and self.items.cache.state(use.plan.mm_hash) is Residency.ABSENT
            and use.lose()
        ]
