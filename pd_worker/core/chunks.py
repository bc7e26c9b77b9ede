"""Pieces of requests that enter a step."""

from __future__ import annotations

from triptych.pd_worker.core.items import ItemTracker, gather_rows
from triptych.pd_worker.core.kv_cache.manager import KVCacheManager
from triptych.pd_worker.core.outputs import ScheduledChunk
from triptych.pd_worker.core.request import RequestState
from triptych.pd_worker.core.scheduler_limits import Budget


class ChunkCutter:
    """Says where a request's next prefill chunk ends, and cuts it."""

    def __init__(self, kv: KVCacheManager, items: ItemTracker) -> None:
        self._kv = kv
        self._items = items

    def prefill_end(self, state: RequestState, budget: Budget) -> int:
        """Of the next prefill chunk: budget, missing items, and spans that enter whole. It may be empty."""
        start = state.num_computed_tokens
        end = min(state.num_tokens, start + budget.for_prefill)
        end = self._around_atomic(state, start, end, budget)
        return self._items.stop_before_missing(state, start, end)

    def _around_atomic(self, state: RequestState, start: int, end: int, budget: Budget) -> int:
        for feature in state.features:
            placement = feature.placement
            if placement.atomic and placement.offset < end < placement.end:
                if placement.offset > start:
                    end = placement.offset
                else:
                    # Decodes must not keep it out for ever: the first prefill of a step may go beyond.
                    end = start if budget.prefilling else placement.end
        return end

    def cut(self, state: RequestState, end: int) -> ScheduledChunk:
        """All tokens from the first that is not computed up to `end`."""
        start = state.num_computed_tokens
        rows = gather_rows(state, start, end) if start < state.request.num_prompt_tokens else ()
        blocks = self._kv.table(state.request_id)[: self._kv.blocks_for(end)]
        samples = end == state.num_tokens
        cross = self._items.cross_blocks(state)
        length = state.features[0].plan.rows if cross else 0
        return ScheduledChunk(state, start, end - start, tuple(blocks), rows, samples, cross, length)
