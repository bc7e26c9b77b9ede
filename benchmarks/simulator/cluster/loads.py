"""The connector's worker role in virtual time: fetches take their time, moves do not."""

from __future__ import annotations

from triptych.ec_connector.base import ECConnectorMetadata
from triptych.ec_connector.connectors.reports import Reports
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.simulator.cluster.context import SimulationContext
from triptych.simulator.cluster.loop import VirtualTimer


class SimulatedLoads:
    """Stands where `RedisConnectorWorker` does. Host buffers are never short: admission has seen to that.

    Transfers that have ended are in `reports`.
    """

    def __init__(self, context: SimulationContext, reports: Reports) -> None:
        self._loop = context.loop
        self._costs = context.costs.pd
        self._store = context.store
        self._reports = reports
        self._under_way: dict[LoadId, VirtualTimer] = {}
        self._landed: set[LoadId] = set()

    @property
    def held(self) -> int:
        """Host copies, and loads under way."""
        return len(self._landed) + len(self._under_way)

    def start(self, metadata: ECConnectorMetadata | None) -> None:
        """Carries the step's orders out."""
        assert isinstance(metadata, TransferMetadata)
        for copy in metadata.drops:
            self._landed.discard(copy)
            if timer := self._under_way.pop(copy, None):
                timer.cancel()
            self._reports.forget(copy)
        for fetch in metadata.fetches:
            self._fetch(fetch)
        for copy in metadata.moves:
            if copy in self._landed:
                self._reports.loaded(copy)
            else:
                self._reports.failed(copy, "its host copy is gone")

    def _fetch(self, fetch: Fetch) -> None:
        copy = LoadId(fetch.plan.mm_hash, fetch.generation)
        plan = self._store.load(copy.mm_hash)
        if self._store.in_memory:
            self._land(copy, 0.0, found=plan is not None)
            return
        started = self._loop.now
        seconds = self._store.trip if plan is None else self._costs.load(plan.nbytes)

        def done() -> None:
            del self._under_way[copy]
            self._land(copy, self._loop.now - started, found=plan is not None)

        self._under_way[copy] = self._loop.call_later(seconds, done)

    def _land(self, copy: LoadId, seconds: float, *, found: bool) -> None:
        if found:
            self._landed.add(copy)
            self._reports.fetched(copy, seconds)
        else:
            self._reports.failed(copy, "no such key")
