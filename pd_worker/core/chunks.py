"""The chunks of a step: which tokens of a request are computed, into which blocks, from which rows."""

from __future__ import annotations

from triptych.pd_worker.core.items.tracker import ItemTracker
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.outputs import GatheredRows, ScheduledChunk, SchedulerOutput
from triptych.pd_worker.core.request import RequestState


class ChunkMaker:
    """Adds chunks of requests that hold their blocks."""

    def __init__(self, kv: KVCacheManager, items: ItemTracker) -> None:
        self._kv = kv
        self._items = items

    def add(
        self, output: SchedulerOutput, state: RequestState, start: int, end: int, *, overlap: bool = False
    ) -> ScheduledChunk:
        """Tokens [start, end) of the request, whose items in there are all READY."""
        samples = end == state.num_prompt_tokens + len(state.output_token_ids)
        rows = gather_rows(state, start, end) if start < state.num_prompt_tokens else ()
        blocks = tuple(self._kv.table(state.request_id)[: self._kv.blocks_for(end)])
        cross = self._items.cross.table(state.request_id) if state.cross is not None else ()
        length = state.features[0].plan.rows if cross else 0
        chunk = ScheduledChunk(state, start, end - start, blocks, rows, samples, cross, length, overlap)
        output.chunks.append(chunk)
        return chunk


def gather_rows(state: RequestState, start: int, end: int) -> tuple[GatheredRows, ...]:
    """Which encoder rows go to which tokens of the chunk [start, end), one entry per stretch."""
    gathered: list[GatheredRows] = []
    for feature in state.features:
        placement = feature.placement
        row = 0
        for first, count in placement.runs or ((0, placement.length),):
            lo = max(start, placement.offset + first)
            hi = min(end, placement.offset + first + count)
            if lo < hi:
                skipped = lo - placement.offset - first
                gathered.append(GatheredRows(feature.mm_hash, row + skipped, hi - lo, lo - start))
            row += count
    return tuple(gathered)
