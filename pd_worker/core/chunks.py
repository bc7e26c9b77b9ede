"""The chunks of a step, its token budget, and which blocks and rows each chunk of a request uses."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.pd_worker.core.items.tracker import ItemTracker
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.kv_cache.state_slots import StateCopy
from triptych.pd_worker.core.outputs import GatheredRows, Projection, ScheduledChunk, SchedulerOutput
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
        pooling, ends = state.request.pooling, end == state.num_prompt_tokens + len(state.output_token_ids)
        samples = ends and (pooling is None or pooling.scores)
        rows = gather_rows(state, start, end) if start < state.num_prompt_tokens else ()
        blocks = tuple(self._kv.table(state.request_id)[: self._kv.blocks_for(end)])
        cross = self._items.cross.table(state.request_id) if state.cross is not None else ()
        length = state.features[0].plan.rows if cross else 0
        slot, snapshot = self._slots(state, end)
        chunk = ScheduledChunk(
            *(state, start, end - start, blocks, rows, samples, cross, length, overlap, slot, snapshot),
            pools=ends and pooling is not None,
        )
        output.chunks.append(chunk)
        return chunk

    def allocate(self, state: RequestState, prefix: list[int], num_computed: int, *, spare: int) -> bool:
        """Blocks for all known tokens and for the cross table, and a state slot, or nothing.

        `spare` blocks are left free.
        """
        cross = self._items.cross
        if state.cross is not None and not cross.acquire(state.request_id, state.cross.plan):
            spare += cross.blocks_for(state.cross.plan)
        at = self._kv.boundaries(state.chain, state.num_prompt_tokens, state.num_tokens, num_computed)
        if self._kv.allocate(state.request_id, prefix, state.num_tokens, spare=spare, keep_at=at):
            return True
        cross.release(state.request_id)
        return False

    def cut(self, state: RequestState, start: int, end: int) -> int:
        """The end of a chunk of tokens [start, end), or the first before it at which the state is kept."""
        states = self._kv.states
        return end if states is None else states.cut(state.request_id, start, end)

    def restore_state(self, output: SchedulerOutput, state: RequestState, num_blocks: int) -> None:
        """Restores the state of a request whose first `num_blocks` blocks are cached, from their snapshot."""
        if (states := self._kv.states) is not None and num_blocks:
            source = states.restore(state.chain.digests(num_blocks)[-1])
            output.states_restored.append(StateCopy(source, states.slot(state.request_id)))

    def _slots(self, state: RequestState, end: int) -> tuple[int, int]:
        """The request's slot, and that of the snapshot after `end` tokens; -1: none."""
        if (states := self._kv.states) is None:
            return -1, -1
        snapshot = None
        if end % self._kv.block_size == 0 and states.ends_at(state.request_id, end):
            snapshot = states.begin(state.chain.digests(end // self._kv.block_size)[-1])
        return states.slot(state.request_id), -1 if snapshot is None else snapshot


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


#: Encoder rows whose projection costs about as much as one prefill token: keys and values are two of a
#: layer's matrix products, which together have the size of about sixteen of them.
_ROWS_PER_TOKEN = 8


@dataclass(slots=True)
class Budget:
    """Tokens left in this step's budget; `prefill` bounds those of prefill chunks."""

    tokens: int
    prefill: int
    prefilling: bool = False

    def spend_prefill(self, chunk: ScheduledChunk) -> None:
        self.tokens -= chunk.count
        self.prefill -= chunk.count
        self.prefilling = True

    def spend_projection(self, projection: Projection) -> None:
        """Subtracts a projection's cost; it is never split, even where it costs more than is left."""
        cost = -(-projection.rows // _ROWS_PER_TOKEN)
        self.tokens = max(0, self.tokens - cost)
        self.prefill -= cost

    @property
    def for_prefill(self) -> int:
        return max(0, min(self.tokens, self.prefill))

    def prefill_end(self, state: RequestState, start: int, num_tokens: int) -> int:
        """End of a prefill chunk from `start` up to `num_tokens`, by the budget and by atomic spans."""
        end = min(num_tokens, start + self.for_prefill)
        for first, last in state.spans:
            if first < end < last:
                # Decodes must not starve it: the first prefill chunk of a step may exceed the budget.
                whole = start if self.prefilling else last
                end = first if first > start else whole
        return end
