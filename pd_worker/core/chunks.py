"""Chunks of a step within its token budget, also of requests whose next item is still being encoded."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from triptych.pd_worker.core.admission import OrderedRequests, SchedulerLimits
from triptych.pd_worker.core.items.tracker import ItemTracker, Readiness
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.kv_cache.state_slots import StateCopy, StateSlots
from triptych.pd_worker.core.outputs import (
    GatheredRows,
    OverlapStats,
    Projection,
    ScheduledChunk,
    SchedulerOutput,
)
from triptych.pd_worker.core.request import RequestState
from triptych.pd_worker.core.tenant_turns import TenantTurns


class ChunkMaker:
    """Adds chunks of requests that hold their blocks."""

    def __init__(self, kv: KVCacheManager, items: ItemTracker, turns: TenantTurns) -> None:
        self._kv = kv
        self._items = items
        self._turns = turns

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
        states = self._kv.states
        slot, kept = (-1, ()) if states is None else self._slots(states, state, start, end)
        chunk = ScheduledChunk(
            *(state, start, end - start, blocks, rows, samples, cross, length, overlap, slot, kept),
            pools=ends and pooling is not None,
        )
        output.chunks.append(chunk)
        if self._turns.several:
            self._turns.charge(state.tenant, end - start)
        return chunk

    def allocate(self, state: RequestState, prefix: list[int], num_computed: int, *, spare: int) -> bool:
        """Blocks for all known tokens and for the cross table, and a state slot, or nothing.

        `spare` blocks are left free.
        """
        cross = self._items.cross
        if state.cross is not None and not cross.acquire(state.request_id, state.cross.plan):
            spare += cross.blocks_for(state.cross.plan)
        placements = (feature.placement for feature in state.features)
        ends = [placement.offset + placement.length for placement in placements]
        at = self._kv.boundaries(state.chain, state.num_prompt_tokens, state.num_tokens, num_computed, ends)
        if self._kv.allocate(state.request_id, prefix, state.num_tokens, spare=spare, keep_at=at):
            return True
        cross.release(state.request_id)
        return False

    def restore_state(self, output: SchedulerOutput, state: RequestState, num_blocks: int) -> None:
        """Restores the state of a request whose first `num_blocks` blocks are cached, from their snapshot."""
        if (states := self._kv.states) is not None and num_blocks:
            source = states.restore(state.chain.digests(num_blocks)[-1])
            output.states_restored.append(StateCopy(source, states.slot(state.request_id)))

    def _slots(
        self, states: StateSlots, state: RequestState, start: int, end: int
    ) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The request's slot, and the snapshots of a chunk of tokens [start, end)."""
        size, kept = self._kv.block_size, []
        for at in states.kept_in(state.request_id, start, end):
            if at % size == 0 and (index := states.begin(state.chain.digests(at // size)[-1])) is not None:
                kept.append((at, index))
        return states.slot(state.request_id), tuple(kept)


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


@dataclass(slots=True)
class _Begun:
    """The state of a waiting request that has been prefilled in part."""

    #: Prompt tokens that others had computed before.
    cached: int
    #: Tokens that are computed, by others or early: full blocks only.
    computed: int
    #: KV blocks of the whole request, which count as taken; 0 once a computed block was evicted.
    blocks: int


class OverlapPrefill:
    """Chunks of waiting requests, from what is left of a step once every request that could start has.

    The prefix cache alone keeps what such a chunk computes: its blocks are taken for the step and freed at
    its end, so that a waiting request holds no block and no slot. When its items are there it starts as any
    other, behind a cached prefix. Without prefix caching, or when not `enabled`, there are no such chunks.
    With recurrent layers a snapshot keeps the state at the chunk's end.

    No chunk is made unless the whole requests of all that have begun so fit the free blocks. If blocks are
    evicted nevertheless, the request is not prefilled early again: no token is computed three times.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        items: ItemTracker,
        chunks: ChunkMaker,
        limits: SchedulerLimits,
        *,
        enabled: bool,
    ) -> None:
        self._kv = kv
        self._items = items
        self._chunks = chunks
        self._limits = limits
        self._enabled = enabled and kv.prefix_caching and (kv.states is None or kv.states.num_snapshots > 0)
        #: Requests with tokens to compute before their first missing item.
        self._able = OrderedRequests[RequestState](key=lambda state: state.order)
        self._begun: dict[RequestState, _Begun] = {}
        #: KV blocks of all requests in `_begun`.
        self._blocks = 0
        self._stats = OverlapStats()

    def examine(self, state: RequestState, num_computed: int, readiness: Readiness) -> None:
        """An admitted request may have changed; its cached prefix has `num_computed` tokens.

        One that has run before is not prefilled early: what it had computed may be in host memory.
        """
        self._able.discard(state)
        if not self._enabled or state.first_scheduled_at is not None:
            return
        if self._intact(state, num_computed) and readiness is not Readiness.READY:
            stop = self._items.stop_before_missing(state, num_computed, state.num_tokens)
            if self._in_full_blocks(state, num_computed, stop) > num_computed:
                self._able.add(state)

    def start(self, state: RequestState, num_computed: int) -> int:
        """The request starts with `num_computed` tokens in blocks. Returns how many others computed."""
        begun = self._begun.get(state)
        self._intact(state, num_computed)
        self.forget(state)
        return num_computed if begun is None else min(begun.cached, num_computed)

    def put_off(self, state: RequestState) -> None:
        """The request waits to be admitted again; what is computed of it early is still its own."""
        self._able.discard(state)

    def forget(self, state: RequestState) -> None:
        """The request waits no more. Idempotent."""
        self._able.discard(state)
        if (begun := self._begun.pop(state, None)) is not None:
            self._blocks -= begun.blocks

    def schedule(self, output: SchedulerOutput, budget: Budget, running: int, slots: int) -> None:
        """Adds chunks in the order of the requests, where budget and blocks are left by `running` requests,
        and `slots` slots.

        A step with nothing else in it has to be worth its overhead: items may come while it lasts. Of
        requests with the same next block only the first is prefilled: the others will find it.
        """
        made: set[bytes] = set()
        for state in list(islice(self._able, max(0, slots))):
            if budget.for_prefill < self._kv.block_size:
                return
            prefix = self._kv.find_prefix(state.chain, state.num_tokens)
            start = len(prefix) * self._kv.block_size
            if not self._intact(state, start):
                continue
            end = budget.prefill_end(state, start, state.num_tokens)
            end = self._in_full_blocks(state, start, self._items.stop_before_missing(state, start, end))
            if end <= start:
                return
            if not output.chunks and end - start < self._limits.fewest_overlap_tokens:
                continue
            if (block := state.chain.digests(len(prefix) + 1)[-1]) in made:
                continue
            if not self._take_blocks(state, prefix, end, running):
                return
            self._chunks.restore_state(output, state, len(prefix))
            made.add(block)
            budget.spend_prefill(self._chunks.add(output, state, start, end, overlap=True))

    def end(self, chunk: ScheduledChunk) -> None:
        """The chunk is computed: its full blocks are in the prefix cache, and free."""
        state = chunk.state
        self._kv.register(state.request_id, state.chain, chunk.end, chunk.kept_at)
        self._kv.free(state.request_id)
        self._begun[state].computed = chunk.end // self._kv.block_size * self._kv.block_size
        self._stats.tokens += chunk.count

    def drain_stats(self) -> OverlapStats:
        """Counts since the last call."""
        stats, self._stats = self._stats, OverlapStats()
        return stats

    def _intact(self, state: RequestState, num_computed: int) -> bool:
        """Whether all that was computed of the request early is still there. If not, it is given up."""
        begun = self._begun.get(state)
        if begun is None or (begun.blocks and num_computed >= begun.computed):
            return True
        self._able.discard(state)
        if begun.blocks:
            self._stats.lost_tokens += begun.computed - max(num_computed, begun.cached)
            self._blocks -= begun.blocks
            begun.blocks = 0
        return False

    def _in_full_blocks(self, state: RequestState, start: int, end: int) -> int:
        """The end of a chunk up to `end` of which as little as possible is computed again.

        That is the end of a block, unless a span that attends both ways lies across it. `start` where no
        block would be filled.
        """
        end = state.before_span(end)
        full = end // self._kv.block_size * self._kv.block_size
        if full <= start:
            return start
        return end if any(first < full < last for first, last in state.spans) else full

    def _take_blocks(self, state: RequestState, prefix: list[int], end: int, running: int) -> bool:
        """Blocks for a chunk up to `end`, if the requests in `_begun` fit the free blocks with this one.

        Each of the `running` requests will soon need a block.
        """
        begun = self._begun.get(state)
        blocks = self._kv.blocks_for(state.num_tokens) if begun is None else 0
        if self._blocks + blocks + running > self._kv.num_free:
            return False
        if not self._kv.allocate(state.request_id, prefix, end, keep_at=(end,)):
            return False
        if begun is None:
            cached = len(prefix) * self._kv.block_size
            self._begun[state] = _Begun(cached, cached, blocks)
            self._blocks += blocks
            self._stats.requests += 1
        return True
