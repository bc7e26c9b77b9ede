"""Decodes of one step: a token of each running request, but those of a tenant that rests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.pd_worker.core.admission import SchedulerLimits
from triptych.pd_worker.core.chunks import Budget, ChunkMaker
from triptych.pd_worker.core.giving_way import GivingWay
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.outputs import SchedulerOutput
from triptych.pd_worker.core.request import RequestState, RequestStatus
from triptych.pd_worker.core.tenant_turns import TenantTurns

Preempt = Callable[[RequestState, SchedulerOutput], None]


@dataclass(frozen=True, slots=True)
class DecodeTurns:
    """Decodes come first in a step; what they leave of its budget is for prompts."""

    limits: SchedulerLimits
    kv: KVCacheManager
    giving_way: GivingWay
    chunks: ChunkMaker
    turns: TenantTurns

    def plan(self, output: SchedulerOutput, running: Sequence[RequestState], preempt: Preempt) -> Budget:
        """The budget that is left. `running` changes with each that is preempted."""
        budget = Budget(self.limits.max_num_batched_tokens, self.limits.max_num_batched_tokens)
        lacking, resting = self._grow(output, running, preempt), self.turns.resting
        for state in running if not lacking else [one for one in running if one not in lacking]:
            if budget.tokens == 0:
                break
            if state.is_decoding and state.tenant != resting:
                self.chunks.add(output, state, state.num_computed_tokens, state.num_computed_tokens + 1)
                budget.tokens -= 1
        if output.chunks:
            budget.prefill = self.limits.prefill_cap
        return budget

    def _grow(
        self, output: SchedulerOutput, running: Sequence[RequestState], preempt: Preempt
    ) -> set[RequestState]:
        """Blocks for requests whose last one is full, of late requests where none is free; who gets none."""
        lacking: set[RequestState] = set()
        size = self.kv.block_size
        for one in [one for one in running if one.num_computed_tokens % size == 0 and one.is_decoding]:
            while one.status is RequestStatus.RUNNING and not self.kv.grow(one.request_id, one.num_tokens):
                if (victim := self.giving_way.latest(running)) is one:
                    lacking.add(one)
                    break
                preempt(victim, output)
        return lacking
