"""The scheduler: which requests compute which tokens in a step, which wait, and which are preempted."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable

from triptych.base.errors import DeadlineExceeded, InternalError, RequestError, Unavailable
from triptych.base.types import FinishReason
from triptych.ec_connector.base import ECConnectorOutput
from triptych.pd_worker.core import request_events
from triptych.pd_worker.core.admission import CrossLimits, SchedulerLimits, check_request
from triptych.pd_worker.core.chunks import Budget, ChunkMaker, OverlapPrefill
from triptych.pd_worker.core.decode_turns import DecodeTurns
from triptych.pd_worker.core.giving_way import GivingWay
from triptych.pd_worker.core.items.stage import ItemStage
from triptych.pd_worker.core.items.tracker import ItemTracker, Readiness
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager, SwapManager
from triptych.pd_worker.core.kv_cache.state_slots import StateCopy
from triptych.pd_worker.core.outputs import (
    ModelRunnerOutput,
    RawLogprobs,
    ScheduledChunk,
    SchedulerOutput,
    SchedulerStats,
)
from triptych.pd_worker.core.prompt_turns import PromptTurns
from triptych.pd_worker.core.request import EngineRequest, RequestState, RequestStatus, RequestTable
from triptych.pd_worker.core.request_events import EngineEvent, OutputProcessor
from triptych.pd_worker.core.step_shares import StepShares
from triptych.pd_worker.core.tenant_turns import TenantTurns
from triptych.pd_worker.core.waiting_requests import WaitingRequests


class Scheduler:
    """The scheduler of one engine; the caller alternates `schedule`, execution and `update`.

    Tenants are served in turns, the requests of one by priority and arrival, resumed ones first. A request
    waits for room for its items, then for these, then for blocks and, if it generates, a slot. It gets the
    blocks of its known tokens when it starts, then one at a time. When none is left, or a tenant has none in
    the batch, a late one is preempted and computed again later (`GivingWay`): the first one goes on.

    `cross` is set for an encoder-decoder model: a request then starts together with its cross table, which is
    written in the same step. With `overlap_prefill` what is left of a step goes to requests that wait for
    items.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        items: ItemTracker,
        cross: CrossLimits | None = None,
        swap: SwapManager | None = None,
        *,
        overlap_prefill: bool = False,
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.items = items
        self.swap = swap or SwapManager(0)
        self._cross_limits = cross
        self._turns, self._shares = TenantTurns(), StepShares(limits.least_prefill)
        self._chunks = ChunkMaker(kv, items, self._turns)
        self._prompts = PromptTurns(kv, items, self._chunks, self._turns)
        self._overlap = OverlapPrefill(kv, items, self._chunks, limits, enabled=overlap_prefill)
        self._step = 0
        self._requests = RequestTable(items.table)
        self._waiting = WaitingRequests(self._turns)
        self._giving_way = GivingWay(limits, kv, self._turns, self._waiting.startable)
        self._decodes = DecodeTurns(limits, kv, self._giving_way, self._chunks, self._turns)
        self._running: list[RequestState] = []
        self._free_slots = limits.max_num_seqs
        #: Running requests that leave their blocks with the next step.
        self._pausing: list[RequestState] = []
        stage = (self._requests, self._waiting, items, kv, self.swap, self._overlap, self._turns)
        self._item_stage = ItemStage(*stage, cross_items=cross is not None)
        self._events: list[EngineEvent] = []
        self._outputs = OutputProcessor(limits.max_model_len)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[RequestState]:
        """The running requests in the order of service. Not to be changed."""
        return self._running

    def next_deadline(self) -> float | None:
        return self._requests.next_deadline()

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest for a request that can never run. Thread-safe."""
        check_request(request, self.limits, self._cross_limits)
        self.items.check(request)

    def add(self, request: EngineRequest, now: float) -> None:
        """Adds a checked request. A later attempt ends the earlier one; the same one is ignored."""
        if (known := self._requests.get(request.key)) is not None:
            if known.request.attempt >= request.attempt:
                return
            self._finish(known, FinishReason.ABORT)
        state = self._item_stage.new_state(request, now)
        self._requests.add(state)
        self._turns.add(state.tenant)
        self._shares.came(state.tenant, now)
        self._waiting.add(state)
        if request.output.finished is not None:
            # A resumed request whose output was complete before it was submitted here.
            if text := request.output.flush():
                self._events.append(request_events.new_tokens(state, (), text))
            self._finish(state, request.output.finished)

    def mark_ready(self, mm_hashes: Iterable[str], now: float) -> None:
        """These embeddings are in the store; counts also for requests that are submitted shortly after."""
        self._item_stage.mark_ready(mm_hashes, now)

    def cancel(self, request_ids: Iterable[str], proxy_id: str) -> None:
        """Ends requests of any status; unknown ones are ignored."""
        for request_id in request_ids:
            if (state := self._requests.get((proxy_id, request_id))) is not None:
                self._finish(state, FinishReason.ABORT)

    def pause(self, paused: Iterable[str], resumed: Iterable[str], proxy_id: str) -> None:
        """Paused requests leave their blocks to others, until they are resumed; unknown ones are ignored.

        One that waits still starts, and stops after that step. A resumed one goes on where it stopped.
        """
        for request_id in paused:
            if (state := self._requests.get((proxy_id, request_id))) is not None and not state.paused:
                state.paused = True
                self._pausing.append(state)
        for request_id in resumed:
            if (state := self._requests.get((proxy_id, request_id))) is not None:
                state.paused = False
                if state.status is RequestStatus.PAUSED:
                    state.status = RequestStatus.WAITING_ADMISSION
                    self._waiting.add(state)

    def fail(self, request: EngineRequest, error: RequestError) -> None:
        """Ends one request with `error`, even one on which `add` raised."""
        if (state := self._requests.get(request.key)) and state.request.attempt == request.attempt:
            self._finish(state, FinishReason.ERROR, error)
        else:
            self._events.append(request_events.refused(request, error))

    def fail_item(self, mm_hash: str, error: RequestError) -> None:
        """Ends every request on the item with `error`."""
        self._fail((one for one in self._requests if any(f.mm_hash == mm_hash for f in one.features)), error)

    def fail_unloaded(self, keys: Collection[str] | None = None) -> None:
        """Ends admitted requests that lack an embedding, of `keys` or any: others may reach the store."""
        for state in self._requests:
            lacking = self._item_stage.lacking(state) if state.admitted and state.features else set()
            if lacking if keys is None else lacking.intersection(keys):
                error = Unavailable("this PD worker does not reach the embedding store", retry_after=1.0)
                self._finish(state, FinishReason.ERROR, error)

    def fail_all(self, error: RequestError) -> list[EngineEvent]:
        """Ends every request with `error`; all events since the last `update`."""
        self._fail(self._requests, error)
        return self._drain_events()

    def reset(self, error: RequestError) -> list[EngineEvent]:
        """As `fail_all`, for an error after which the bookkeeping may be wrong: all blocks are free then."""
        events = self.fail_all(error)
        self._free_slots = self.limits.max_num_seqs
        self.kv.reset()
        self.items.cross.reset()
        self.swap.reset()
        return events

    def collect_stats(self) -> SchedulerStats:
        """Figures for metrics; those since the last report are drained. Pressure: of waits for embeddings."""
        kv, states = self.kv, self.kv.states
        pressure = self._waiting.num_incomplete / max(1, len(self._running))
        return SchedulerStats(
            *(len(self._running), len(self._waiting), pressure, kv.num_blocks, kv.num_used),
            self.swap.num_used,
            *((0, 0) if states is None else (states.num_used, states.snapshots_used)),
            tenants_waiting=self._turns.waiting(),
            items=self.items.collect_stats(),
            overlap=self._overlap.drain_stats(),
            latencies=self._outputs.drain_latencies(),
        )

    def schedule(self, now: float) -> SchedulerOutput:
        """The next step. Waiting requests and blocks change at once, tokens once `update` is called."""
        self._step += 1
        output = SchedulerOutput(self._step, now)
        self.kv.begin_step()
        if late := self._requests.pop_late(now):
            error = DeadlineExceeded("the request's time is over: ask for less, or raise --request-timeout")
            self._fail(late, error)
        events, failed = self._item_stage.advance(self._running, now)
        self._events += events
        for state, refusal in failed:
            self._finish(state, FinishReason.ERROR, refusal)
        for state in self._pausing:
            if state.paused and state.status is RequestStatus.RUNNING:
                self._preempt(state, output)
        self._pausing.clear()
        for state in self._giving_way.to_tenants_without(self._running) if self._turns.several else ():
            self._preempt(state, output)
            output.gave_way += 1
        if self._turns.several:
            self._shares.several(now)
            self._turns.resting = self._shares.resting(self._waiting.startable.tenants, self._running)
        budget = self._plan(output, now)
        if self._turns.resting is not None:
            self._turns.resting = None
            if not output.computes:  # none of the beginning requests can go on now
                budget = self._plan(output, now)
        self._turns.charge_only(self.limits.max_num_batched_tokens - budget.tokens)
        output.ec_connector_metadata = self.items.build_metadata(output)
        return output

    def _plan(self, output: SchedulerOutput, now: float) -> Budget:
        """The step's chunks, of all tenants but one that rests."""
        budget = self._decodes.plan(output, self._running, self._preempt)
        budget.prefill = int(min(budget.prefill, self._shares.rows.count))
        self._prompts.collect(self._running, output)
        goes_on = self._start(output, budget, now)
        self._prompts.go_on(output, budget)
        if goes_on and self._turns.resting is None:
            self._overlap.schedule(output, budget, len(self._running), self._free_slots)
        return budget

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> list[EngineEvent]:
        """Applies the step's result; all events since the last call, in order."""
        if result.moved_items:
            self._end_transfers(result.ec_connector_output)
        if output.swap_out or output.swap_in:
            self._end_swaps(output, result)
        if result.error is not None:
            self._fail_step(output, result.error)
            return self._drain_events()
        if output.projections or output.restored:
            error = InternalError("an item's cross-attention keys and values are NaN or infinity")
            self._fail(self.items.end_projections(output, self._running, result.unprojected), error)
        output.share_seconds(now)
        self._shares.computed(output.rows_of_tenants(), now - output.at)
        self._shares.ended(output.starts, output.prompt_rows, now - output.at, now)
        index = 0
        for place, chunk in enumerate(output.computable(swapped_in=result.swapped_in)):
            if place in result.non_finite:
                error = InternalError("the model's output for this request is NaN or infinity")
                self._finish(chunk.state, FinishReason.ERROR, error)
            elif (reason := result.errors.get(index)) is not None and chunk.samples:
                self._finish(chunk.state, FinishReason.ERROR, reason)
            elif chunk.overlap:
                self._overlap.end(chunk)
            elif chunk.pools:
                self._end_pooled(chunk, result.pooled.get(place), now)
            else:
                self._advance(chunk)
                if chunk.samples:
                    self._append(chunk.state, result.sampled[index], result.logprobs.get(index), now)
            index += chunk.samples
        return self._drain_events()

    def _end_transfers(self, moved: ECConnectorOutput) -> None:
        """Applies the connector's report; requests end whose embeddings cannot be loaded here."""
        self._events += self._item_stage.update(moved)
        if unreachable := {failure.mm_hash for failure in moved.failed if failure.unreachable}:
            self.fail_unloaded(unreachable)
        for key in self.items.unmovable():
            reason = "this PD worker's device has no free memory for an item's embedding"
            self.fail_item(key, Unavailable(reason, retry_after=1.0))

    def _end_swaps(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Requests whose copies have failed are recomputed; host blocks are read only if none has."""
        if result.swapped_out:
            self.swap.commit()
        elif failed := set(self.swap.fail()):
            for state in self._requests:
                if state.request_id in failed and state.status is not RequestStatus.RUNNING:
                    self._wait_again(state)
        if result.swapped_in or not output.swap_in:
            return
        keys = set(output.restored)
        lost = [
            state
            for state in self._running
            if state.restored_in == output.step or any(f.mm_hash in keys for f in state.features)
        ]
        self.items.cross.fail(keys)
        for state in lost:
            self._leave_batch(state)
            self.kv.free(state.request_id)
            self._wait_again(state)

    def _wait_again(self, state: RequestState, *, swapped: bool = False) -> None:
        """Queues a request without blocks: to be recomputed, or to continue where it stopped if swapped."""
        state.num_computed_tokens = 0
        keeps_room = self.items.preempt(state, swapped=swapped)
        if state.paused:
            state.status = RequestStatus.PAUSED
            return
        state.status = RequestStatus.PREEMPTED if keeps_room else RequestStatus.WAITING_ADMISSION
        self._waiting.add(state)

    def _fail_step(self, output: SchedulerOutput, reason: Exception) -> None:
        """Ends all requests that were part of the step."""
        failed = InternalError("the engine failed to compute this request")
        error = reason if isinstance(reason, RequestError) else failed
        restored = [state for state in self._running if state.restored_in == output.step]
        awaiting = self.items.awaiting_tables(output, self._running)
        self._fail([*(chunk.state for chunk in output.chunks), *awaiting, *restored], error)

    def _drain_events(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        return events

    def _preempt(self, state: RequestState, output: SchedulerOutput) -> None:
        output.preempted.append(state)
        self._leave_batch(state)
        blocks = self.kv.table(state.request_id)[: self.kv.blocks_for(state.num_computed_tokens)]
        plan, table = self.items.last_table(state) if state.cross is not None else (None, ())
        copies = self.swap.swap_out(state.request_id, blocks, state.num_computed_tokens, plan, table)
        output.swap_out += copies or ()
        if copies and (host_slot := self.swap.slot(state.request_id)) is not None:
            output.states_out.append(StateCopy(self.kv.slot(state.request_id), host_slot))
        self.kv.free(state.request_id)
        state.preemptions += 1
        self._wait_again(state, swapped=copies is not None)

    def _start(self, output: SchedulerOutput, budget: Budget, now: float) -> bool:
        """Starts waiting requests; False where the budget, the slots or the blocks were not enough."""
        limit = self.limits.max_num_seqs
        for state in self._waiting.startable.with_slots(lambda: self._free_slots):
            self._prompts.go_on(output, budget, before=state)
            if budget.for_prefill == 0 or output.starts >= self._shares.starts.count:
                return False
            if self.swap.is_leaving(state.request_id):
                continue
            prefix, num_computed = self._item_stage.known_prefix(state)
            # Only this request is skipped: one that waits for an encoder does not block the queue.
            if state.features and self.items.ensure_loading(state, num_computed, now) is not Readiness.READY:
                self._waiting.unready(state)
                continue
            if state.cross is not None and not self._can_attend(state):
                continue
            # Generating requests will soon need a block each, or every start would be a preemption.
            if not self._chunks.allocate(state, prefix, num_computed, spare=limit - self._free_slots):
                self._waiting.startable.hold(state)
                return False
            self._chunks.restore_state(output, state, len(prefix))
            if state.cross is not None and (projection := self.items.write_table(state, output)):
                budget.spend_projection(projection)
            host_slot = self.swap.slot(state.request_id)
            if copies := self.swap.swap_in(state.request_id, self.kv.table(state.request_id)):
                output.swap_in += copies
                if host_slot is not None:
                    output.states_in.append(StateCopy(host_slot, self.kv.slot(state.request_id)))
                state.restored_in = output.step
            self._run(state, num_computed, output, now)
            self._prompts.compute(state, output, budget)
        return self._free_slots > 0

    def _can_attend(self, state: RequestState) -> bool:
        """Its cross table or its embedding can be read in this step and matches the plan."""
        if (error := self.items.contradiction(state)) is not None:
            self._finish(state, FinishReason.ERROR, error)
            return False
        return self.items.can_attend(state)

    def _run(self, state: RequestState, num_computed: int, output: SchedulerOutput, now: float) -> None:
        self._waiting.discard(state)
        output.starts += 1
        bisect.insort(self._running, state, key=lambda running: running.order)
        self._turns.start(state.tenant)
        self._free_slots -= state.request.pooling is None
        state.status = RequestStatus.RUNNING
        state.num_computed_tokens = num_computed
        if state.first_scheduled_at is None:
            state.first_scheduled_at = now
            found = self._overlap.start(state, min(num_computed, state.num_prompt_tokens))
            if state.request.cached_tokens is None:  # else another worker has counted it
                state.request.cached_tokens = found
                if self.kv.prefix_caching:
                    output.prefix_queried += state.num_prompt_tokens
                    output.prefix_hit += found
        if state.features:
            self.items.consume(state)
            self._events += self.items.report_resident(state)
        state.items_at = now if state.items_at is None else state.items_at
        if state.paused:
            self._pausing.append(state)

    def _leave_batch(self, state: RequestState) -> None:
        self._running.remove(state)
        self._free_slots += state.request.pooling is None
        self._turns.stop(state.tenant)

    def _advance(self, chunk: ScheduledChunk) -> None:
        state = chunk.state
        state.num_computed_tokens = end = chunk.start + chunk.count
        if end % self.kv.block_size < chunk.count:  # it fills a block
            self.kv.register(state.request_id, state.chain, end, chunk.kept_at)
        if state.unconsumed:
            self.items.consume(state)

    def _append(self, state: RequestState, token: int, logprobs: RawLogprobs | None, now: float) -> None:
        event, reason, error = self._outputs.append(state, token, logprobs, now)
        if event is not None:
            self._events.append(event)
        if reason is not None:
            self._finish(state, reason, error)

    def _end_pooled(self, chunk: ScheduledChunk, pooled: bytes | None, now: float) -> None:
        self._advance(chunk)
        self._outputs.note_pooled(chunk.state, now)
        error = None if pooled else InternalError("the engine has not pooled this request")
        self._finish(chunk.state, FinishReason.ERROR if error else FinishReason.STOP, error, pooled or b"")

    def _fail(self, states: Iterable[RequestState], error: RequestError) -> None:
        for state in states:
            self._finish(state, FinishReason.ERROR, error)

    def _finish(
        self,
        state: RequestState,
        reason: FinishReason,
        error: RequestError | None = None,
        pooled: bytes = b"",
    ) -> None:
        if state.status is RequestStatus.FINISHED:
            return
        if state.status is RequestStatus.RUNNING:
            self._leave_batch(state)
        else:
            self._waiting.discard(state)
            self._overlap.forget(state)
        state.status = RequestStatus.FINISHED
        self._requests.remove(state)
        self._turns.remove(state.tenant)
        self.kv.free(state.request_id)
        self.swap.free(state.request_id)
        self.items.finish(state)
        self._events.append(request_events.finished(state, reason, error, pooled))
