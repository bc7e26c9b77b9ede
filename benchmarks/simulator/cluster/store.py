"""The embedding store in virtual time: whole values, bounded in bytes, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict

from triptych.types import ItemPlan


class ByteLru:
    """Plans by mm_hash, at most `capacity` bytes of embeddings. A value above it is not kept at all."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._plans: OrderedDict[str, ItemPlan] = OrderedDict()
        self.nbytes = 0
        self.evictions = 0

    def get(self, mm_hash: str) -> ItemPlan | None:
        """The plan of what is there, which is then the most recently used."""
        plan = self._plans.get(mm_hash)
        if plan is not None:
            self._plans.move_to_end(mm_hash)
        return plan

    def put(self, plan: ItemPlan) -> bool:
        """False when it was there already, and is kept as it is."""
        if self.get(plan.mm_hash) is not None:
            return False
        self._plans[plan.mm_hash] = plan
        self.nbytes += plan.nbytes
        while self.nbytes > self.capacity:
            _, gone = self._plans.popitem(last=False)
            self.nbytes -= gone.nbytes
            self.evictions += 1
        return True


class SimulatedStore(ByteLru):
    """What all workers share, with the bytes that went out.

    `trip`: seconds of a worker's message there and back. With `in_memory` it is the workers' own: transfers
    take no time.
    """

    def __init__(self, capacity: int, trip: float, *, in_memory: bool = False) -> None:
        super().__init__(capacity)
        self.trip = 0.0 if in_memory else trip
        self.in_memory = in_memory
        self.loaded_bytes = 0

    def load(self, mm_hash: str) -> ItemPlan | None:
        """None for what was evicted."""
        plan = self.get(mm_hash)
        self.loaded_bytes += plan.nbytes if plan is not None else 0
        return plan
