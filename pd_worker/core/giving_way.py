"""Which running requests give way: to one that needs a block, or to a tenant that has none in the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triptych.pd_worker.core.admission import SchedulerLimits, own_order_of
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.request import RequestState
from triptych.pd_worker.core.tenant_turns import TenantTurns
from triptych.pd_worker.core.waiting_requests import StartableRequests


@dataclass(frozen=True, slots=True)
class GivingWay:
    """The tenant with the most requests in the batch gives way, where it has more than one, by its last.

    So the first request of all never gives way to anybody, and what runs alone for its tenant only where all
    do. Which of a tenant's requests is its last, its priorities say; between tenants it is the latest.
    """

    limits: SchedulerLimits
    kv: KVCacheManager
    turns: TenantTurns
    startable: StartableRequests

    def latest(self, running: Sequence[RequestState]) -> RequestState:
        """The one that gives its blocks up when none is left."""
        if not self.turns.several:
            return max(running, key=own_order_of)
        if (tenant := self.turns.richest()) is None:
            return running[-1]
        return max((state for state in running if state.tenant == tenant), key=own_order_of)

    def to_tenants_without(self, running: Sequence[RequestState]) -> Iterator[RequestState]:
        """The ones to preempt now, so that each waiting tenant without any in the batch may start one.

        Each is to be preempted before the next one is asked for.
        """
        turns, taken = self.turns, 0
        if not turns.several or not (tenants := [t for t in self.startable.tenants if not turns.running(t)]):
            return
        slots = self.limits.max_num_seqs - sum(state.request.pooling is None for state in running)
        while tenants:
            tenant = turns.next(tenants)
            tenants.remove(tenant)
            state = self.startable.first_of(tenant)
            assert state is not None
            slot = state.request.pooling is None
            # As a start needs them: its own, and one for each that runs.
            taken += self.kv.blocks_for(state.num_tokens) + 1
            while slots < slot or self.kv.num_free < taken + len(running):
                victim = self._one_of_several(running, slot=slots < slot)
                if victim is None:
                    return
                slots += victim.request.pooling is None
                yield victim
            slots -= slot

    def _one_of_several(self, running: Sequence[RequestState], *, slot: bool) -> RequestState | None:
        tenant = self.turns.richest()
        own = (state for state in running if state.tenant == tenant)
        able = (state for state in own if state.request.pooling is None or not slot)
        return max(able, key=own_order_of, default=None)
