"""The scheduler role that every connector with host copies shares: it decides from its table of loads."""

from __future__ import annotations

from typing import Any

from triptych.ec_connector.base import (
    ECConnectorOutput,
    ECConnectorScheduler,
    ECTransferConfig,
    HasFeatures,
    Presence,
)
from triptych.ec_connector.connectors.load_table import LoadTable
from triptych.ec_connector.metadata import TransferMetadata
from triptych.types import ItemPlan


class TableScheduler(ECConnectorScheduler):
    """See `ECConnectorScheduler`; the rules are `LoadTable`'s."""

    def __init__(self, config: ECTransferConfig) -> None:
        super().__init__(config)
        self.table = LoadTable()
        self._step = 0

    def add_request(self, request: HasFeatures) -> None:
        self.table.hold(request.request_id, [feature.plan for feature in request.features])

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

    def build_connector_meta(self, scheduler_output: Any) -> TransferMetadata:
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
