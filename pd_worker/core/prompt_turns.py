"""Prefill of begun prompts within a step's budget, in turns between tenants and before their next starts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from triptych.pd_worker.core.admission import own_order_of
from triptych.pd_worker.core.chunks import Budget, ChunkMaker
from triptych.pd_worker.core.items.tracker import ItemTracker
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.outputs import SchedulerOutput
from triptych.pd_worker.core.request import RequestState
from triptych.pd_worker.core.tenant_turns import TenantTurns


class PromptTurns:
    """The running requests with prompt tokens left. Those of one tenant go on in order, before its starts.

    A start of lower priority goes before them.
    """

    def __init__(
        self, kv: KVCacheManager, items: ItemTracker, chunks: ChunkMaker, turns: TenantTurns
    ) -> None:
        self._kv = kv
        self._items = items
        self._chunks = chunks
        self._turns = turns
        self._begun: dict[str, deque[RequestState]] = {}

    def collect(self, running: Sequence[RequestState], output: SchedulerOutput) -> None:
        """Begins a step whose decodes are planned."""
        self._begun.clear()
        if len(output.chunks) == len(running):
            return  # All of them decode.
        for state in running:
            if not state.is_decoding and state.tenant != self._turns.resting:
                self._begun.setdefault(state.tenant, deque()).append(state)
        for tenant, states in self._begun.items():
            if len(states) > 1:
                self._begun[tenant] = deque(sorted(states, key=own_order_of))

    def go_on(self, output: SchedulerOutput, budget: Budget, before: RequestState | None = None) -> None:
        """Computes more of them; with `before`, what is due before the start of this request."""
        while self._begun and budget.for_prefill:
            tenant = self._turns.least(self._begun)
            if before is not None and self._turns.precedes(before.tenant, tenant):
                tenant = before.tenant
            if tenant not in self._begun:
                return
            states = self._begun[tenant]
            if before is not None and before.tenant == tenant and before.priority < states[0].priority:
                return
            self.compute(states.popleft(), output, budget)
            if not states:
                del self._begun[tenant]

    def compute(self, state: RequestState, output: SchedulerOutput, budget: Budget) -> None:
        """A chunk of the request's prompt, as far as the budget goes and its items are there."""
        start = state.num_computed_tokens
        end = limit = budget.prefill_end(state, start, state.num_tokens)
        if state.features:
            end = state.before_span(self._items.stop_before_missing(state, start, end))
        # Less than a block before an item is not worth a step: the item may be there in the next one.
        if end > start and (end == limit or end - start >= self._kv.block_size):
            budget.spend_prefill(self._chunks.add(output, state, start, end))
