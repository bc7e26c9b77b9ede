"""The scheduler role of all connectors with host copies, which decides from a table of loads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from triptych.base.types import ItemPlan
from triptych.ec_connector.base import (
    ECConnectorOutput,
    ECConnectorScheduler,
    ECTransferConfig,
    HasFeatures,
    Presence,
)
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata


@dataclass(slots=True)
class _HeldKey:
    plan: ItemPlan
    #: How often each request still needs the item: an image may occur twice in one prompt.
    holders: Counter[str] = field(default_factory=Counter)
    #: LOADING: a load is under way; its generation is this one.
    state: Presence = Presence.UNKNOWN
    generation: int = 0
    #: The MISS has been reported: the item is being encoded again.
    awaited: bool = False
    #: A ready mark came while an older load was running: if that fails, the item is loaded again.
    marked_again: bool = False

    @property
    def presence(self) -> Presence:
        return Presence.LOADING if self.awaited else self.state


class TableScheduler(ECConnectorScheduler):
    """The scheduler role: the keys that requests hold, and their loads.

    A key without holders is removed with its load.
    """

    def __init__(self, config: ECTransferConfig) -> None:
        super().__init__(config)
        self._entries: dict[str, _HeldKey] = {}
        self._step = self._generation = 0
        self._fetches: dict[str, Fetch] = {}
        self._moves: dict[str, LoadId] = {}
        self._drops: list[LoadId] = []

    @property
    def num_held(self) -> int:
        """Keys that requests hold."""
        return len(self._entries)

    def add_request(self, request: HasFeatures) -> None:
        for feature in request.features:
            entry = self._entries.setdefault(feature.mm_hash, _HeldKey(feature.plan))
            entry.holders[request.request_id] = 0
        for feature in request.features:
            self._entries[feature.mm_hash].holders[request.request_id] += 1

    def item_ready(self, mm_hash: str) -> None:
        entry = self._entries.get(mm_hash)
        if entry is None or entry.state is Presence.HIT or not self.config.is_consumer:
            return
        if entry.state is Presence.LOADING:
            entry.marked_again = mm_hash not in self._fetches
        else:
            self._begin(mm_hash, entry)

    def item_missing_reported(self, mm_hash: str) -> None:
        entry = self._entries.get(mm_hash)
        if entry is not None and entry.state is Presence.MISS:
            entry.state, entry.awaited = Presence.UNKNOWN, True

    def plan_of(self, mm_hash: str) -> ItemPlan | None:
        entry = self._entries.get(mm_hash)
        return None if entry is None else entry.plan

    def has_caches(self, request: HasFeatures) -> list[Presence]:
        entries = [self._entries.get(feature.mm_hash) for feature in request.features]
        return [Presence.UNKNOWN if entry is None else entry.presence for entry in entries]

    def update_state_after_alloc(self, request: HasFeatures, index: int) -> None:
        mm_hash = request.features[index].mm_hash
        entry = self._entries.get(mm_hash)
        if entry is not None and entry.state is Presence.HIT:
            self._moves[mm_hash] = LoadId(mm_hash, entry.generation)

    def release(self, request_id: str, mm_hash: str) -> None:
        self._release(request_id, mm_hash, 1)

    def build_connector_meta(self, scheduler_output: object) -> TransferMetadata:
        self._step += 1
        fetches, moves, drops = tuple(self._fetches.values()), tuple(self._moves.values()), tuple(self._drops)
        if fetches or moves or drops:
            self._fetches, self._moves, self._drops = {}, {}, []
        return TransferMetadata(self._step, fetches, moves, drops)

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        for mm_hash in output.fetched:
            entry = self._current(mm_hash, output)
            if entry is not None and entry.state is Presence.LOADING:
                entry.state = Presence.HIT
        for failure in output.failed:
            entry = self._current(failure.mm_hash, output)
            if entry is None or entry.state not in (Presence.LOADING, Presence.HIT):
                continue
            if failure.no_memory:
                continue  # The host copy stays, for another attempt.
            # Frees a host copy that could not be moved: else it would be kept as long as the key is held.
            self._drops.append(LoadId(failure.mm_hash, entry.generation))
            if entry.marked_again:
                self._begin(failure.mm_hash, entry)
            else:
                entry.state = Presence.MISS

    def request_finished(self, request: HasFeatures) -> None:
        for feature in request.features:
            self._release(request.request_id, feature.mm_hash, len(request.features))

    def shutdown(self) -> None:
        self._entries.clear()

    def _release(self, request_id: str, mm_hash: str, occurrences: int) -> None:
        entry = self._entries.get(mm_hash)
        if entry is None or request_id not in entry.holders:
            return
        entry.holders[request_id] -= occurrences
        if entry.holders[request_id] <= 0:
            del entry.holders[request_id]
        if entry.holders:
            return
        del self._entries[mm_hash]
        self._moves.pop(mm_hash, None)
        queued = self._fetches.pop(mm_hash, None)
        if queued is None and entry.state in (Presence.LOADING, Presence.HIT):
            self._drops.append(LoadId(mm_hash, entry.generation))

    def _begin(self, mm_hash: str, entry: _HeldKey) -> None:
        self._generation += 1
        entry.state, entry.generation = Presence.LOADING, self._generation
        entry.awaited = entry.marked_again = False
        direct = self.config.direct
        source = None if direct is None else direct.sources.get(mm_hash)
        self._fetches[mm_hash] = Fetch(entry.plan, self._generation, source)

    def _current(self, mm_hash: str, output: ECConnectorOutput) -> _HeldKey | None:
        """The key's entry, unless the report is of another load than its current one."""
        entry = self._entries.get(mm_hash)
        if entry is None or mm_hash in self._fetches:
            return None
        return entry if output.generations.get(mm_hash, entry.generation) == entry.generation else None
