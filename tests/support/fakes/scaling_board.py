"""The scaling board in memory, by the clock of the test: what the store's scripts do, without a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from triptych.base.scaling import PoolDemand, ScalingDecision, ScalingRules, SharedRules
from triptych.store.control import StoreUnavailable


@dataclass
class BoardData:
    """What the store keeps for one pool. `down` refuses every proxy."""

    clock: Callable[[], float]
    demands: dict[str, tuple[PoolDemand, float]] = field(default_factory=dict)
    decision: tuple[ScalingDecision, float] | None = None
    rules: ScalingRules | None = None
    generation: int = 0
    supported_until: float = 0.0
    down: bool = False
    #: Every number of workers that was announced, without repetitions.
    announced: list[int] = field(default_factory=list)
    #: Every set of rules that was in force, without repetitions.
    ruled: list[ScalingRules] = field(default_factory=list)

    def in_force(self) -> ScalingDecision | None:
        return self.decision[0] if self.decision is not None and self.decision[1] > self.clock() else None

    def flush(self) -> None:
        """Everything is lost, as when the server is restarted."""
        self.demands, self.decision, self.rules, self.generation = {}, None, None, 0


class MemoryBoard:
    """One proxy's board over the shared data."""

    def __init__(self, data: BoardData) -> None:
        self.data = data
        self._known: ScalingDecision | None = None
        self._rules: tuple[ScalingRules | None, int] = (None, 0)

    async def publish(self, proxy_id: str, pool: str, demand: PoolDemand, term: float) -> list[PoolDemand]:
        now = self._now()
        self.data.demands[proxy_id] = demand, now + term
        return [each for each, until in self.data.demands.values() if until > now]

    async def withdraw(self, proxy_id: str, pool: str) -> None:
        self.data.demands.pop(proxy_id, None)

    async def decision(self, pool: str) -> ScalingDecision | None:
        self._now()
        self._known = self.data.in_force()
        return self._known

    async def announce(self, pool: str, decision: ScalingDecision, term: float) -> bool:
        now, data = self._now(), self.data
        if data.in_force() != self._known or data.generation != self._rules[1]:
            return False
        data.decision, self._known = (decision, now + term), decision
        if data.announced[-1:] != [decision.workers]:
            data.announced.append(decision.workers)
        return True

    async def agree(
        self, pool: str, own: ScalingRules, expected: int | None, term: float, *, newest: bool = False
    ) -> SharedRules:
        now, data = self._now(), self.data
        known, generation = self._rules
        if known is not None and generation > data.generation:
            data.rules, data.generation, data.supported_until = known, generation, 0.0
        if data.rules != own and (newest or expected == data.generation):
            data.rules, data.generation = own, max(int(now * 1000), data.generation + 1)
        if data.rules == own:
            data.supported_until = now + term
        assert data.rules is not None
        if data.ruled[-1:] != [data.rules]:
            data.ruled.append(data.rules)
        self._rules = data.rules, data.generation
        return SharedRules(data.rules, data.generation, data.supported_until > now)

    def _now(self) -> float:
        if self.data.down:
            raise StoreUnavailable("switched off")
        return self.data.clock()
