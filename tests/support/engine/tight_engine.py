"""A modelless engine over the connector of production: its host buffers, and a store without a server."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from support.engine.engine_requests import ModellessEngine, make_feature, make_request
from triptych.base.delta import Delta
from triptych.base.types import ItemPlan, MMFeature
from triptych.ec_connector.base import ECConnectorOutput, ECTransferConfig
from triptych.ec_connector.connectors.host_buffers import DeviceCopier, HostMemory, PinnedMemory, PinnedPool
from triptych.ec_connector.connectors.redis import RedisConnectorWorker
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.store.bulk import Loaded, LoadResult, Missing

#: Elements of a float32 row.
ROW = 1024
ROW_BYTES = 4 * ROW


class ServerlessStore:
    """What `EmbeddingStore.load` does, without a server; each load takes some turns of the loop."""

    def __init__(self) -> None:
        self.plans: dict[str, ItemPlan] = {}

    async def load(self, plan: ItemPlan, into) -> LoadResult:  # type: ignore[no-untyped-def]
        for _ in range(plan.rows % 3):
            await asyncio.sleep(0)
        if self.plans.get(plan.mm_hash) != plan:
            return Missing("no such key")
        body = into(plan.nbytes)
        half, mark = plan.nbytes // 2, mark_of(plan)
        body.write(0, mark * half)
        await asyncio.sleep(0)
        body.write(half, mark * (plan.nbytes - half))
        return Loaded(body)

    async def close(self) -> None:
        """Nothing is open."""


def mark_of(plan: ItemPlan) -> bytes:
    """The byte that an item's values are made of."""
    return bytes([int(plan.mm_hash[:2], 16)])


class CopyingDevice(DeviceCopier):
    """As a device with memory of its own, on a CPU."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def to_device(self, pieces, plan):  # type: ignore[no-untyped-def]
        assert len(pieces) <= 1 or sum(piece.numel() for piece in pieces) == plan.nbytes
        return super().to_device([torch.cat([*pieces, torch.empty(0, dtype=torch.uint8)])], plan)


@dataclass
class TightEngine(ModellessEngine):
    """Scheduler, encoder cache, admission and host buffers as in production, of one capacity.

    Its loop runs a few turns in each step. Who is admitted has its items encoded, after some steps.
    """

    known: dict[str, ItemPlan] = field(default_factory=dict)
    #: Host copies in one pool, as for a device.
    pooled: bool = False
    #: Host copies that a pool had no single piece for.
    scattered: int = 0
    #: The encoder makes one item at a time, in the order in which they were asked for.
    one_by_one: bool = False
    #: Tokens of each request that were prefilled before all of its items were there.
    early: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loop = asyncio.new_event_loop()
        config = ECTransferConfig(store_url="unix:///none", host_buffer_bytes=self.capacity, load_timeout=1e6)
        self.worker = RedisConnectorWorker(config, loop=self.loop)  # type: ignore[assignment]
        self.transport = ServerlessStore()
        self.worker._client._store = self.transport  # type: ignore[attr-defined]
        self._seen = 0
        self._wanted: list[ItemPlan] = []
        if self.pooled:
            pool = PinnedPool(PinnedMemory(self.capacity))
            self.worker._loads._memory = HostMemory(self.capacity, pool)  # type: ignore[attr-defined]
            self.worker._loads._copier = CopyingDevice()  # type: ignore[attr-defined]
            self._count_pieces(pool)

    def _count_pieces(self, pool: PinnedPool) -> None:
        take = pool.allocate

        def counting(nbytes: int) -> list[torch.Tensor]:
            pieces = take(nbytes)
            self.scattered += len(pieces) > 1
            return pieces

        pool.allocate = counting  # type: ignore[method-assign]

    def turn(self, count: int = 3) -> None:
        for _ in range(count):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def finished(self) -> ECConnectorOutput:
        self.turn()
        return self.worker.get_finished()

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.known |= {feature.mm_hash: feature.plan for feature in request.features}
        super().add(*requests)

    def encode_what_was_asked_for(self) -> None:
        """Saves and marks the items of requests admitted, and those missed, since the last call.

        With `one_by_one` only the first of them that is left.
        """
        for event in self.events[self._seen :]:
            if isinstance(event, Delta):
                continue
            if event.HasField("admitted"):
                state = self.scheduler._requests.get((event.proxy_id, event.request_id))
                features = () if state is None else state.features
                self._wanted += (feature.plan for feature in features)
            elif event.HasField("item_missing"):
                self._wanted.append(self.known[event.item_missing.mm_hash])
        self._seen = len(self.events)
        count = 1 if self.one_by_one else len(self._wanted)
        made, self._wanted = self._wanted[:count], self._wanted[count:]
        self.encode(*made)

    def encode(self, *plans: ItemPlan) -> None:
        for plan in plans:
            self.transport.plans[plan.mm_hash] = plan
        self.scheduler.mark_ready([plan.mm_hash for plan in plans], self.now)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = super().run(output)
        for rows in (rows for chunk in output.chunks for rows in chunk.rows):
            entry = self.resident[rows.mm_hash]
            part = entry.data[rows.first : rows.first + rows.count].contiguous().view(torch.uint8)
            assert (part == mark_of(entry.plan)[0]).all(), "the rows are another item's"
        return result

    def step(
        self,
        *,
        error: Exception | None = None,
        seconds: Callable[[SchedulerOutput], float] = lambda output: 0.0,
    ) -> SchedulerOutput:
        output = super().step(error=error, seconds=seconds)
        self.now += 0.01
        self._check_overlap(output)
        return output

    def _check_overlap(self, output: SchedulerOutput) -> None:
        """Requests that wait hold nothing, and take only what those that can start have left."""
        scheduler, running = self.scheduler, self.scheduler.running
        waiting = [state for state in scheduler._requests if state not in running]
        assert not any(self.kv.table(state.request_id) for state in waiting), "a waiting request holds blocks"
        held = {block for state in running for block in self.kv.table(state.request_id)}
        assert self.kv.num_used == len(held), "blocks are lost"
        early = [chunk for chunk in output.chunks if chunk.overlap]
        assert len(output.chunks) <= self.max_num_seqs
        assert sum(chunk.count for chunk in output.chunks) <= self.budget
        for chunk in early:
            state = chunk.state
            assert not chunk.samples and not len(scheduler._waiting.startable)
            self.early[state.request_id] += chunk.count
            # All of it again at most once, when it starts.
            assert self.early[state.request_id] <= state.num_prompt_tokens

    def assert_at_rest(self) -> None:
        super().assert_at_rest()
        self.step()
        self.turn(20)
        assert self.worker.host_bytes == 0  # type: ignore[attr-defined]

    def close(self) -> None:
        self.worker.shutdown()
        self.turn(20)
        self.loop.close()


def wide_feature(name: str, offset: int, rows: int) -> MMFeature:
    """An item of `rows` rows of ROW_BYTES each."""
    feature = make_feature(name, offset, rows)
    return MMFeature(dataclasses.replace(feature.plan, width=ROW), feature.placement)


def tight_requests(rng: random.Random, rows: int, count: int) -> list[EngineRequest]:
    """Requests of which most fill a cache of `rows` rows alone, to the last byte; some share items."""
    requests = []
    for number in range(count):
        features: list[MMFeature] = []
        offset = rng.randint(0, 2)
        left = rows if rng.random() < 0.7 else rng.randint(1, rows // 2)
        while left and len(features) < 4:
            size = rng.randint(1, left) if rng.random() < 0.6 else left
            features.append(wide_feature(f"item {size} {rng.randint(0, 2)}", offset, size))
            offset += size + rng.randint(0, 1)
            left -= size
        prompt = [number, *[rng.randint(0, 1)] * (offset + rng.randint(0, 4))]
        requests.append(
            make_request(
                f"r{number}", prompt, features, max_tokens=rng.randint(1, 6), arrival=number, ready=()
            )
        )
    return requests


def serve(engine: TightEngine, rng: random.Random, requests: list[EngineRequest], *, limit: int) -> bool:
    """Whether all requests end within `limit` steps, under losses, cancels and a slow encoder."""
    waiting = list(requests)
    for _ in range(limit):
        if waiting and rng.random() < 0.5:
            engine.add(waiting.pop(0))
        if rng.random() < 0.05:
            engine.transport.plans.clear()
        if rng.random() < 0.03:
            engine.scheduler.cancel([f"r{rng.randrange(len(requests))}"], "proxy")
        if rng.random() < 0.5:
            engine.encode_what_was_asked_for()
        engine.step()
        if not waiting and engine.idle:
            return True
    return False
