"""The scheduler role of all connectors with host copies, which decides from a table of loads."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from triptych.ec_connector.base import (
    ECConnectorOutput,
    ECConnectorScheduler,
    ECTransferConfig,
    HasFeatures,
    Presence,
)
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.types import ItemPlan


class TableScheduler(ECConnectorScheduler):
    """The scheduler role: translates engine calls into those of a `LoadTable`."""

    def __init__(self, config: ECTransferConfig) -> None:
        super().__init__(config)
        self.table = LoadTable()
        self._step = 0

    def add_request(self, request: HasFeatures) -> None:
        self.table.add_holder(request.request_id, [feature.plan for feature in request.features])

    def item_ready(self, mm_hash: str) -> None:
        if self.config.is_consumer:
            self.table.mark_ready(mm_hash)

    def item_missing_reported(self, mm_hash: str) -> None:
        self.table.mark_reported(mm_hash)

    def plan_of(self, mm_hash: str) -> ItemPlan | None:
        return self.table.plan(mm_hash)

    def has_caches(self, request: HasFeatures) -> list[Presence]:
        return [self.table.presence(feature.mm_hash) for feature in request.features]

    def update_state_after_alloc(self, request: HasFeatures, index: int) -> None:
        self.table.move(request.features[index].mm_hash)

    def release(self, request_id: str, mm_hash: str) -> None:
        self.table.release(request_id, mm_hash)

    def build_connector_meta(self, scheduler_output: object) -> TransferMetadata:
        self._step += 1
        fetches, moves, drops = self.table.drain()
        return TransferMetadata(self._step, fetches, moves, drops)

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        for mm_hash in output.fetched:
            self.table.fetched(mm_hash, output.generations.get(mm_hash))
        for failure in output.failed:
            self.table.failed(failure.mm_hash, output.generations.get(failure.mm_hash))

    def request_finished(self, request: HasFeatures) -> None:
        for feature in request.features:
            self.table.release(request.request_id, feature.mm_hash, wholly=True)

    def shutdown(self) -> None:
        self.table = LoadTable()


class _State(enum.Enum):
    UNKNOWN = Presence.UNKNOWN
    #: A load is under way; its generation is the entry's.
    LOADING = Presence.LOADING
    HIT = Presence.HIT
    MISS = Presence.MISS


@dataclass(slots=True)
class _HeldKey:
    plan: ItemPlan
    #: How often each request still needs the item: an image may occur twice in one prompt.
    holders: Counter[str] = field(default_factory=Counter)
    state: _State = _State.UNKNOWN
    #: The MISS has been reported: the item is being encoded again.
    awaited: bool = False
    generation: int = 0
    #: A ready mark came while an older load was running: if that fails, the item is loaded again.
    marked_again: bool = False

    @property
    def presence(self) -> Presence:
        return Presence.LOADING if self.awaited else self.state.value


class LoadTable:
    """The keys that requests hold, and their loads. A key without holders is removed with its load."""

    def __init__(self) -> None:
        self._entries: dict[str, _HeldKey] = {}
        self._generation = 0
        self._fetches: dict[str, Fetch] = {}
        self._moves: dict[str, LoadId] = {}
        self._drops: list[LoadId] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add_holder(self, request_id: str, plans: list[ItemPlan]) -> None:
        """Adds a request that holds these items, once per occurrence in its prompt. Idempotent."""
        by_key = {plan.mm_hash: plan for plan in reversed(plans)}
        for mm_hash, count in Counter(plan.mm_hash for plan in plans).items():
            entry = self._entries.setdefault(mm_hash, _HeldKey(by_key[mm_hash]))
            entry.holders[request_id] = count

    def release(self, request_id: str, mm_hash: str, *, wholly: bool = False) -> None:
        """Releases one occurrence of the item in the request's prompt, or all. Idempotent at zero."""
        entry = self._entries.get(mm_hash)
        if entry is None or request_id not in entry.holders:
            return
        entry.holders[request_id] -= 1
        if wholly or entry.holders[request_id] <= 0:
            del entry.holders[request_id]
        if not entry.holders:
            self._forget(mm_hash, entry)

    def _forget(self, mm_hash: str, entry: _HeldKey) -> None:
        del self._entries[mm_hash]
        self._moves.pop(mm_hash, None)
        queued = self._fetches.pop(mm_hash, None)
        if queued is None and entry.state in (_State.LOADING, _State.HIT):
            self._drops.append(LoadId(mm_hash, entry.generation))

    def plan(self, mm_hash: str) -> ItemPlan | None:
        """The item's plan, by the first of the requests that hold the key."""
        entry = self._entries.get(mm_hash)
        return None if entry is None else entry.plan

    def presence(self, mm_hash: str) -> Presence:
        entry = self._entries.get(mm_hash)
        return Presence.UNKNOWN if entry is None else entry.presence

    def mark_ready(self, mm_hash: str) -> None:
        """The item's embedding is stored: starts a load unless there is a host copy or a load."""
        entry = self._entries.get(mm_hash)
        if entry is None or entry.state is _State.HIT:
            return
        if entry.state is _State.LOADING:
            entry.marked_again = mm_hash not in self._fetches
        else:
            self._begin(mm_hash, entry)

    def _begin(self, mm_hash: str, entry: _HeldKey) -> None:
        self._generation += 1
        entry.state, entry.generation = _State.LOADING, self._generation
        entry.awaited = entry.marked_again = False
        self._fetches[mm_hash] = Fetch(entry.plan, self._generation)

    def mark_reported(self, mm_hash: str) -> None:
        """The MISS has been reported; the item is not loaded before its next ready mark."""
        entry = self._entries.get(mm_hash)
        if entry is not None and entry.state is _State.MISS:
            entry.state, entry.awaited = _State.UNKNOWN, True

    def move(self, mm_hash: str) -> None:
        """Orders the host copy's move into the encoder cache in this step; ignored without a host copy."""
        entry = self._entries.get(mm_hash)
        if entry is not None and entry.state is _State.HIT:
            self._moves[mm_hash] = LoadId(mm_hash, entry.generation)

    def fetched(self, mm_hash: str, generation: int | None) -> None:
        """A load's host copy has arrived. Ignored unless it is the key's current load."""
        entry = self._current(mm_hash, generation)
        if entry is not None and entry.state is _State.LOADING:
            entry.state = _State.HIT

    def failed(self, mm_hash: str, generation: int | None) -> None:
        """A load or a move of its host copy has failed. Ignored unless it is the current load."""
        entry = self._current(mm_hash, generation)
        if entry is None or entry.state not in (_State.LOADING, _State.HIT):
            return
        # Frees a host copy that could not be moved: else it would be kept as long as the key is held.
        self._drops.append(LoadId(mm_hash, entry.generation))
        if entry.marked_again:
            self._begin(mm_hash, entry)
        else:
            entry.state = _State.MISS

    def _current(self, mm_hash: str, generation: int | None) -> _HeldKey | None:
        entry = self._entries.get(mm_hash)
        if entry is None or mm_hash in self._fetches or generation not in (None, entry.generation):
            return None
        return entry

    def drain(self) -> tuple[tuple[Fetch, ...], tuple[LoadId, ...], tuple[LoadId, ...]]:
        """(fetches, moves, drops) since the last call."""
        if not (self._fetches or self._moves or self._drops):
            return (), (), ()
        drained = tuple(self._fetches.values()), tuple(self._moves.values()), tuple(self._drops)
        self._fetches, self._moves, self._drops = {}, {}, []
        return drained
