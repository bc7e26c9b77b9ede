"""The ranks' reports of transfers, merged: an item is loaded when it is on all, and failed with any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.ec_connector.base import ECConnectorOutput, FailedLoad
from triptych.ec_connector.metadata import LoadId, TransferMetadata


@dataclass(slots=True)
class _Fetch:
    """One load: the ranks that have its host copy, and the longest that one of them took."""

    fetched: set[int] = field(default_factory=set)
    seconds: float = 0.0
    failed: bool = False


@dataclass(slots=True)
class _Move:
    """A host copy's move into the encoder caches: the ranks that have it there."""

    generation: int
    loaded: set[int] = field(default_factory=set)


class TransferMerger:
    """The transfers that are under way on the `size` ranks of a worker.

    Every load and every move is reported once, as by one rank. A rank's entry in its encoder cache of a move
    that failed elsewhere is reported as loaded one step after the failure: the scheduler, which has no entry
    for it by then, evicts it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._fetches: dict[LoadId, _Fetch] = {}
        self._moves: dict[str, _Move] = {}
        #: Entries of failed moves, to be reported with the next step.
        self._stray: set[str] = set()

    def __len__(self) -> int:
        """Loads and moves that are known."""
        return len(self._fetches) + len(self._moves)

    def begin(self, orders: TransferMetadata) -> None:
        """Notes the orders of a step, before the reports on it are merged."""
        for load_id in orders.drops:
            self._fetches.pop(load_id, None)
        for fetch in orders.fetches:
            self._fetches[fetch.load_id] = _Fetch()
        for load_id in orders.moves:
            self._moves[load_id.mm_hash] = _Move(load_id.generation)

    def merge(self, outputs: Sequence[ECConnectorOutput]) -> ECConnectorOutput:
        """The worker's report of the ranks' reports, which are in the order of the ranks."""
        merged = ECConnectorOutput()
        stray, self._stray = self._stray, set()
        merged.loaded.extend(key for key in sorted(stray) if key not in self._moves)
        for rank, output in enumerate(outputs):
            merged.saved.extend(output.saved)
            merged.unsaved.update(output.unsaved)
            for key, seconds in output.fetched.items():
                self._fetched(rank, key, seconds, output.generations.get(key), merged)
            for key in output.loaded:
                self._loaded(rank, key, merged)
        # After what has succeeded: a key must never be loaded and failed in one report.
        for output in outputs:
            for failure in output.failed:
                self._failed(failure, output.generations.get(failure.mm_hash), merged)
        return merged

    def _fetched(
        self, rank: int, key: str, seconds: float, generation: int | None, merged: ECConnectorOutput
    ) -> None:
        load = self._fetches.get(LoadId(key, generation or 0))
        if load is None or load.failed:
            return
        load.fetched.add(rank)
        load.seconds = max(load.seconds, seconds)
        if len(load.fetched) == self._size:
            merged.fetched[key] = load.seconds
            merged.generations[key] = generation or 0

    def _loaded(self, rank: int, key: str, merged: ECConnectorOutput) -> None:
        move = self._moves.get(key)
        if move is None:
            # A move that failed on another rank, or that the scheduler has given up: its entry is stray.
            merged.loaded.append(key)
            return
        move.loaded.add(rank)
        if len(move.loaded) == self._size:
            del self._moves[key]
            merged.loaded.append(key)

    def _failed(self, failure: FailedLoad, generation: int | None, merged: ECConnectorOutput) -> None:
        key = failure.mm_hash
        load = self._fetches.get(LoadId(key, generation or 0))
        move = self._moves.get(key)
        if move is not None and move.generation == generation:
            del self._moves[key]
            if move.loaded:
                self._stray.add(key)
        elif load is None or load.failed:
            return  # Another rank's failure of this load is reported already.
        if load is not None:
            load.failed = True
        merged.failed.append(failure)
        merged.generations[key] = generation or 0
