"""A modelless engine of several ranks, each with the connector of production over a store of its own mind."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from support.engine.tight_engine import ServerlessStore, TightEngine
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import ECConnectorOutput, ECTransferConfig, EncoderOutput
from triptych.ec_connector.connectors.redis import RedisConnectorWorker
from triptych.ec_connector.metadata import TransferMetadata
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.ranks.ranked_runner import TransferMerger
from triptych.store.bulk import LoadResult, Missing


class ForgetfulStore(ServerlessStore):
    """A store from which one rank's loads may fail while another's succeed."""

    def __init__(self, rng: random.Random, losses: float) -> None:
        super().__init__()
        self._rng, self._losses = rng, losses

    async def load(self, plan: ItemPlan, into) -> LoadResult:  # type: ignore[no-untyped-def]
        if self._rng.random() < self._losses:
            return Missing("evicted between two ranks' loads")
        return await super().load(plan, into)


@dataclass
class RankedTightEngine(TightEngine):
    """`ranks` connectors and encoder caches; each rank's transfers take a time of their own."""

    ranks: int = 2
    seed: int = 0
    #: Share of the loads, and of the moves into an encoder cache, that fail on one rank.
    losses: float = 0.0
    others: list[RedisConnectorWorker] = field(default_factory=list)
    caches: list[dict[str, EncoderOutput]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rng = random.Random(self.seed)
        self.merger = TransferMerger(self.ranks)
        known = self.transport.plans
        self._use(self.worker, known)  # type: ignore[arg-type]
        for _ in range(1, self.ranks):
            config = ECTransferConfig(
                store_url="unix:///none", host_buffer_bytes=self.capacity, load_timeout=1e6
            )
            other = RedisConnectorWorker(config, loop=self.loop)
            self._use(other, known)
            self.others.append(other)
            self.caches.append({})

    def _use(self, worker: RedisConnectorWorker, plans: dict[str, ItemPlan]) -> None:
        store = ForgetfulStore(self.rng, self.losses)
        store.plans = plans
        worker._client._store = store  # type: ignore[assignment]
        copier = worker._loads._copier
        copy = copier.to_device

        def to_device(pieces, plan):  # type: ignore[no-untyped-def]
            if self.rng.random() < self.losses:
                raise MemoryError("no room on this rank")
            return copy(pieces, plan)

        copier.to_device = to_device  # type: ignore[method-assign]

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = output.ec_connector_metadata
        assert isinstance(metadata, TransferMetadata)
        self.merger.begin(metadata)
        for worker, cache in zip(self.others, self.caches, strict=True):
            for key in output.evicted:
                cache.pop(key, None)
            worker.start_load_caches(metadata, cache)
        result = super().run(output)
        for chunk in output.chunks:
            for rows in chunk.rows:
                assert all(rows.mm_hash in cache for cache in self.caches), "not there on every rank"
        return result

    def finished(self) -> ECConnectorOutput:
        self.turn(self.rng.randint(0, 4))
        return self.merger.merge([worker.get_finished() for worker in (self.worker, *self.others)])

    def assert_at_rest(self) -> None:
        super().assert_at_rest()
        for _ in range(4):
            self.step()
            self.turn(20)
        assert all(worker.host_bytes == 0 for worker in self.others)
        assert len(self.merger) == 0
        resident = set(self.cache._entries)
        assert all(set(cache) == resident for cache in (self.resident, *self.caches)), (
            "a rank's entry is stray"
        )

    def close(self) -> None:
        for worker in self.others:
            worker.shutdown()
        super().close()
