"""What the parts of one simulated cluster share: loop, costs, store, counters; and what it gives."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from triptych.base.types import ItemPlan
from triptych_bench.goodput.load.job import RequestRecord
from triptych_bench.simulator.cluster.loop import VirtualLoop
from triptych_bench.simulator.cluster.shape import Limits
from triptych_bench.simulator.costs.costs import CostModel, ModelShape


@dataclass(slots=True)
class Counters:
    """Of the whole simulation, warm-up included; `seconds` is its virtual length.

    `utilisation`: share of time in which towers ("encoder") and steps ("pd"; "prefill" of prefill workers
    alone) were under way, over the workers of the pool; "proxy": CPU seconds of the one proxy per second,
    above 1 if one is not enough. `handed_over`: attempts at workers that were to take a request over.
    """

    seconds: float = 0.0
    tower_items: int = 0
    re_encodes: int = 0
    tokens: int = 0
    handed_over: int = 0
    utilisation: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Simulation:
    """`records` stand in the order of the load. `leftovers` are all zero once every request has ended."""

    records: tuple[RequestRecord, ...]
    counters: Counters
    leftovers: Mapping[str, int]


class ByteLru:
    """Plans by mm_hash, at most `capacity` bytes of embeddings, least recently used out first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._plans: OrderedDict[str, ItemPlan] = OrderedDict()
        self.nbytes = 0

    def get(self, mm_hash: str) -> ItemPlan | None:
        """The plan of what is there, which is then the most recently used."""
        if (plan := self._plans.get(mm_hash)) is not None:
            self._plans.move_to_end(mm_hash)
        return plan

    def put(self, plan: ItemPlan) -> bool:
        """False when it was there already, and is kept as it is. A value above the capacity is not kept."""
        if self.get(plan.mm_hash) is not None:
            return False
        self._plans[plan.mm_hash] = plan
        self.nbytes += plan.nbytes
        while self.nbytes > self.capacity:
            self.nbytes -= self._plans.popitem(last=False)[1].nbytes
        return True


class SimulatedStore(ByteLru):
    """The embedding store that all workers share, and the proxy's look-ups in it.

    `trip`: seconds of a worker's message there and back. With `in_memory` it is the workers' own: transfers
    take no time, the proxy's look-ups still do.
    """

    clock_jumps = 0

    def __init__(self, capacity: int, trip: float, *, in_memory: bool = False) -> None:
        super().__init__(capacity)
        self.trip, self._proxy_trip = 0.0 if in_memory else trip, trip
        self.in_memory = in_memory

    async def look_up(self, keys: Sequence[tuple[str, str]]) -> list[ItemPlan | None]:
        await asyncio.sleep(self._proxy_trip)
        return [self.get(mm_hash) for mm_hash, _ in keys]

    async def epoch(self) -> str:
        await asyncio.sleep(self._proxy_trip)
        return "epoch"


@dataclass(frozen=True, slots=True)
class SimulationContext:
    """The loop, the store and the counters of a simulation, and what it is simulated with.

    `stored_kv`: digests of the KV blocks that prefill workers have passed on; all of them have room.
    """

    loop: VirtualLoop
    costs: CostModel
    model: ModelShape
    limits: Limits
    store: SimulatedStore
    counters: Counters
    stored_kv: set[bytes] = field(default_factory=set)

    def kv_seconds(self, tokens: int) -> tuple[float, float]:
        """Of the KV of so many tokens: until a prefill worker has passed it on, and until another has it."""
        nbytes, bandwidth = tokens * self.model.kv_token_bytes, self.limits.kv_bandwidth
        if bandwidth:
            return 0.0, self.store.trip + nbytes / bandwidth
        return self.costs.encoder.save(nbytes), self.costs.pd.load(nbytes)
