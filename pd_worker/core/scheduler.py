"""Decides each step: who computes which tokens, who waits, who gives way. Pure decisions, no tensors."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterable

from triptych.errors import DeadlineExceeded, InternalError, RequestError
from triptych.pd_worker.core import request_events
from triptych.pd_worker.core.chunks import ChunkCutter
from triptych.pd_worker.core.deadlines import Deadlines
from triptych.pd_worker.core.items import ItemTracker, Sought
from triptych.pd_worker.core.key_index import KeyIndex
from triptych.pd_worker.core.kv_cache.manager import KVCacheManager
from triptych.pd_worker.core.kv_cache.prefix_chain import PrefixChain
from triptych.pd_worker.core.kv_cache.swap_manager import SwapManager
from triptych.pd_worker.core.kv_cache.swapper import Swapper
from triptych.pd_worker.core.outputs import (
    EngineEvent,
    ItemMissing,
    ModelRunnerOutput,
    RawLogprobs,
    ScheduledChunk,
    SchedulerOutput,
)
from triptych.pd_worker.core.ready_marks import ReadyMarks
from triptych.pd_worker.core.request import EngineRequest, RequestState, RequestStatus
from triptych.pd_worker.core.request_check import CrossLimits, check_request
from triptych.pd_worker.core.scheduler_limits import Budget, Latencies, SchedulerLimits
from triptych.pd_worker.core.waiting_requests import WaitingRequests
from triptych.types import FinishReason

__all__ = ["CrossLimits", "Latencies", "Scheduler", "SchedulerLimits"]

logger = logging.getLogger(__name__)


class Scheduler:
    """`schedule`, run, `update`, again. Requests are served in the order of their arrival, those that another
    worker has lost before new ones.

    A request waits for room (its items' bytes), then for its items, then for blocks and a slot; it gets
    all blocks of its known tokens when it starts and one more at a time while it decodes. When none is
    left, the latest request gives its own up and is computed again later: the earliest always goes on.

    `cross` is set for an encoder-decoder model: a request then starts together with its cross table, whose
    projection is work of the step before its first chunk.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        items: ItemTracker,
        cross: CrossLimits | None = None,
        swap: SwapManager | None = None,
    ) -> None:
        self.limits = limits
        self._cross_limits = cross
        self.kv = kv
        self.items = items
        self.swap = swap
        self._swapper = Swapper(kv, items, swap)
        self._step = 0
        self._waiting = WaitingRequests()
        self._running: list[RequestState] = []
        self._states: dict[tuple[str, str], RequestState] = {}
        self._by_key = KeyIndex()
        self._deadlines = Deadlines()
        #: Keys of requests whose cross table was there at the last look.
        self._tables: set[str] = set()
        self._events: list[EngineEvent] = []
        self.latencies = Latencies()
        self._marks = ReadyMarks()
        self._chunks = ChunkCutter(kv, items)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def item_pressure(self) -> float:
        """Requests that wait for embeddings, for each one that runs."""
        return self._waiting.num_incomplete / max(1, len(self._running))

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def check(self, request: EngineRequest) -> None:
        """InvalidRequest for what could never run; the same for every way in."""
        check_request(request, self.limits, self._cross_limits)
        self.items.admission.check(request.features)

    def add(self, request: EngineRequest, now: float) -> None:
        """Takes a checked request in. A later attempt ends the earlier one; the same one is ignored."""
        known = self._states.get(request.key)
        if known is not None:
            if known.request.attempt >= request.attempt:
                return
            self._finish(known, FinishReason.ABORT)
        chain = PrefixChain(
            request.prefix_root,
            request.prompt_token_ids,
            request.output_token_ids,
            request.features,
            self.kv.block_size,
        )
        keys = {feature.mm_hash for feature in request.features}
        stored = {key for key in keys if key in request.ready or self._marks.has(key, now)}
        state = RequestState(request, chain, stored=stored)
        self._states[request.key] = state
        self._by_key.add(state)
        self._deadlines.add(state)
        self._waiting.add(state)
        if request.output.finished is not None:
            self._end_output(state, request.output.flush(), request.output.finished)

    def mark_ready(self, mm_hashes: Iterable[str], now: float) -> None:
        """These embeddings are in the store. A request that is still being taken in learns of it too."""
        keys = set(mm_hashes)
        self._marks.add(keys, now)
        for key in keys:
            for state in self._by_key.naming(key):
                state.stored.add(key)
                state.lost.discard(key)
        self._look_again(keys)

    def cancel(self, request_ids: Iterable[str], proxy_id: str) -> None:
        """Ends requests wherever they stand; unknown ones are ignored."""
        for request_id in request_ids:
            state = self._states.get((proxy_id, request_id))
            if state is not None:
                self._finish(state, FinishReason.ABORT)

    def fail(self, request: EngineRequest, error: RequestError) -> None:
        """Ends one request with `error`, also one that `add` has not taken in as a whole."""
        state = self._states.get(request.key)
        if state is not None and state.request.attempt == request.attempt:
            self._finish(state, FinishReason.ERROR, error)
        else:
            self._events.append(request_events.refused(request, error))

    def fail_item(self, mm_hash: str, error: RequestError) -> None:
        """Ends every request on the item with `error`."""
        for state in [s for s in self._states.values() if any(f.mm_hash == mm_hash for f in s.features)]:
            self._finish(state, FinishReason.ERROR, error)

    def fail_all(self, error: RequestError) -> list[EngineEvent]:
        """Ends every request with `error`; returns all events not told yet."""
        for state in list(self._states.values()):
            self._finish(state, FinishReason.ERROR, error)
        return self._take_events()

    def reset(self, error: RequestError) -> list[EngineEvent]:
        """As `fail_all`; then all blocks, on the device and in host memory, are free and hold nothing known.

        For when an unexpected error may have left the books of blocks wrong.
        """
        events = self.fail_all(error)
        self.kv.reset()
        if self.items.cross is not None:
            self.items.cross.reset()
        if self.swap is not None:
            self.swap.reset()
        return events

    def schedule(self, now: float) -> SchedulerOutput:
        """The next step's work. Takes effect on waiting and blocks; tokens count once `update` is called."""
        self._step += 1
        output = SchedulerOutput(self._step)
        self._look_again(self.items.cache.expire(now))
        self._end_late(now)
        self._look_at_tables()
        self._admit(now)
        self._seek_items(now)
        budget = self._decode(output)
        self._prefill(output, budget, now)
        self._start(output, budget, now)
        output.evicted = self.items.cache.take_evicted()
        output.ec_connector_metadata = self.items.connector.build_connector_meta(output)
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> list[EngineEvent]:
        """Takes in what the step has done; all events since the last call, in order."""
        moved = result.ec_connector_output
        news = self.items.update(moved, self._by_key.naming)
        self._look_again((*moved.fetched, *moved.loaded, *(failure.mm_hash for failure in moved.failed)))
        for event in news:
            if isinstance(event, ItemMissing):
                self._marks.drop(event.mm_hash)
        self._events += news
        self._end_swaps(output, result)
        if result.error is not None:
            self._fail_step(output)
            return self._take_events()
        self._end_projections(output, result)
        index = 0
        for place, chunk in enumerate(output.computable(swapped_in=result.swapped_in)):
            if place in result.spoiled:
                error = InternalError("the model's output for this request is no number")
                self._finish(chunk.state, FinishReason.ERROR, error)
                index += chunk.samples
                continue
            if not chunk.samples:
                self._advance(chunk)
                continue
            if (reason := result.errors.get(index)) is not None:
                self._finish(chunk.state, FinishReason.ERROR, reason)
            else:
                self._advance(chunk)
                self._append(chunk.state, result.sampled[index], result.logprobs.get(index), now)
            index += 1
        return self._take_events()

    def _end_swaps(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """What copies have failed is computed again; host blocks may be read only if none has."""
        if failed := set(self._swapper.end_out(written=result.swapped_out)):
            for state in self._states.values():
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
        self.items.tables_lost(keys)
        for state in lost:
            self._running.remove(state)
            self.kv.free(state.request_id)
            self._wait_again(state)

    def _wait_again(self, state: RequestState, *, swapped: bool = False) -> None:
        """The request has no blocks: it starts again, or goes on where it stopped if it is swapped."""
        state.num_computed_tokens = 0
        keeps_room = self.items.preempt(state, swapped=swapped)
        state.status = RequestStatus.PREEMPTED if keeps_room else RequestStatus.WAITING_ROOM
        self._waiting.add(state)

    def _fail_step(self, output: SchedulerOutput) -> None:
        """Ends all whose work was in the step."""
        error = InternalError("the engine failed to compute this request")
        restored = [state for state in self._running if state.restored_in == output.step]
        for state in [*(chunk.state for chunk in output.chunks), *self._awaiting(output), *restored]:
            self._finish(state, FinishReason.ERROR, error)

    def _end_projections(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """The tables are written: whoever waits for one needs the item's embedding no more."""
        if not output.made_tables:
            return
        for state in self._awaiting(output):
            if any(feature.mm_hash in result.unprojected for feature in state.features):
                error = InternalError("an item of this request has no finite keys and values in the model")
                self._finish(state, FinishReason.ERROR, error)
        self.items.tables_lost(result.unprojected)
        self.items.tables_made(output)
        for state in self._awaiting(output):
            self.items.consume(state)

    def _awaiting(self, output: SchedulerOutput) -> list[RequestState]:
        """Running requests whose cross table was made in this step."""
        keys = set(output.made_tables)
        if not keys:
            return []
        return [state for state in self._running if any(f.mm_hash in keys for f in state.features)]

    def _take_events(self) -> list[EngineEvent]:
        events, self._events = self._events, []
        return events

    def _end_late(self, now: float) -> None:
        for state in self._deadlines.late(now):
            error = DeadlineExceeded("the request's time is over: ask for less, or raise --request-timeout")
            self._finish(state, FinishReason.ERROR, error)

    def _look_again(self, keys: Iterable[str]) -> None:
        """What has become of these keys may let requests go on that wait for them."""
        self._waiting.look_again(self._by_key.naming_any(keys))

    def _look_at_tables(self) -> None:
        """A request whose cross table has come needs less; one whose table has gone may need room again."""
        if self.items.cross is None:
            return
        tables = {key for key, feature in self._by_key.features() if self.items.has_table(feature)}
        self._look_again(tables ^ self._tables)
        self._tables = tables
        for state in self._waiting.changed():
            if not self.items.keeps_room(state):
                state.status = RequestStatus.WAITING_ROOM
            self._waiting.file(state)

    def _admit(self, now: float) -> None:
        """Room in order of arrival: media requests behind one that does not fit wait too."""
        blocked = False
        while (state := self._waiting.first_for_room(text_only=blocked)) is not None:
            if (error := self.items.contradiction(state)) is not None:
                self._finish(state, FinishReason.ERROR, error)
                continue
            if not self.items.admit(state):
                blocked = True
                continue
            state.status = RequestStatus.WAITING_ITEMS
            self._waiting.file(state)
            if state.admitted_at is None:
                state.admitted_at = now
                self._events.append(request_events.admitted(state))

    def _seek_items(self, now: float) -> None:
        """Starts loads ahead of time; again for running requests whose item came to nothing."""
        self._waiting.look_again(self._waiting.prefixes.depending(self.kv.pool.take_changes()))
        for state in self._waiting.changed():
            prefix, num_computed = self._known_prefix(state)
            self._waiting.prefixes.watch(
                state, self.kv.prefix_contents(state.chain, prefix, state.num_tokens)
            )
            sought = self.items.seek(state, num_computed, now)
            self._note_items(state, sought is Sought.HERE, now)
            self._waiting.sought(state, sought)
        for state in self._running:
            if state.features and not state.is_decoding:
                self.items.seek(state, state.num_computed_tokens, now)

    def _note_items(self, state: RequestState, here: bool, now: float) -> None:
        self._events += self.items.found(state)
        if here and state.items_at is None:
            state.items_at = now
            self._waiting.completed(state)

    def _known_prefix(self, state: RequestState) -> tuple[list[int], int]:
        """Blocks that the request would start with, and how many of its tokens need not be computed."""
        if swapped := self._swapper.tokens(state):
            return [], swapped
        prefix = self.kv.find_prefix(state.chain, state.num_tokens)
        return prefix, len(prefix) * self.kv.block_size

    def _decode(self, output: SchedulerOutput) -> Budget:
        budget = Budget(self.limits.max_num_batched_tokens, self.limits.max_num_batched_tokens)
        for state in list(self._running):
            if budget.tokens == 0:
                break
            if state.status is not RequestStatus.RUNNING or not state.is_decoding:
                continue
            if not self._grow(state, output):
                continue
            chunk = self._chunks.cut(state, state.num_tokens)
            output.chunks.append(chunk)
            budget.take(chunk)
        if output.chunks:
            budget.prefill = self.limits.prefill_cap
        return budget

    def _grow(self, state: RequestState, output: SchedulerOutput) -> bool:
        """A block for the newest token, taken from later requests when none is free."""
        while not self.kv.grow(state.request_id, state.num_tokens):
            victim = self._running[-1]
            if victim is state:
                return False
            self._preempt(victim, output)
        return True

    def _preempt(self, state: RequestState, output: SchedulerOutput) -> None:
        output.preempted.append(state)
        self._running.remove(state)
        swapped = self._swapper.take_out(state, output)
        self.kv.free(state.request_id)
        state.preemptions += 1
        self._wait_again(state, swapped=swapped)

    def _prefill(self, output: SchedulerOutput, budget: Budget, now: float) -> None:
        for state in self._running:
            if budget.for_prefill == 0:
                return
            if not state.is_decoding:
                self._prefill_one(state, output, budget)

    def _prefill_one(self, state: RequestState, output: SchedulerOutput, budget: Budget) -> None:
        end = self._chunks.prefill_end(state, budget)
        if end > state.num_computed_tokens:
            chunk = self._chunks.cut(state, end)
            output.chunks.append(chunk)
            budget.take_prefill(chunk)

    def _start(self, output: SchedulerOutput, budget: Budget, now: float) -> None:
        for state in list(self._waiting.startable):
            if budget.for_prefill == 0 or len(self._running) >= self.limits.max_num_seqs:
                return
            if self._swapper.is_leaving(state):
                continue
            prefix, num_computed = self._known_prefix(state)
            # Not the queue: whoever waits for an encoder holds nobody up.
            if self.items.seek(state, num_computed, now) is not Sought.HERE:
                self._waiting.unready(state)
                continue
            if state.request.cross is not None and not self._can_project(state):
                continue
            if not self._allocate(state, prefix):
                return
            if state.request.cross is not None and not self.items.hold_table(state):
                projection = self.items.make_table(state, output)
                if projection is not None:
                    budget.take_projection(projection)
            if self._swapper.bring_back(state, output):
                state.restored_in = output.step
            self._run(state, num_computed, output, now)
            self._prefill_one(state, output, budget)

    def _can_project(self, state: RequestState) -> bool:
        """Its cross table is here, or its embedding is, by the plan that the request says."""
        if (error := self.items.contradiction(state)) is not None:
            self._finish(state, FinishReason.ERROR, error)
            return False
        return self.items.is_resident(state)

    def _allocate(self, state: RequestState, prefix: list[int]) -> bool:
        """Blocks for all known tokens and for the cross table, or nothing.

        Those that decode will soon need a block each; without them every start would be a preemption.
        """
        held = self.items.hold_table(state)
        spare = len(self._running) + (0 if held else self.items.cross_cost(state))
        if self.kv.allocate(state.request_id, prefix, state.num_tokens, spare=spare):
            return True
        self.items.drop_table(state)
        return False

    def _run(self, state: RequestState, num_computed: int, output: SchedulerOutput, now: float) -> None:
        self._waiting.discard(state)
        bisect.insort(self._running, state, key=lambda running: running.order)
        state.status = RequestStatus.RUNNING
        state.num_computed_tokens = num_computed
        if state.first_scheduled_at is None:
            state.first_scheduled_at = now
            state.num_cached_tokens = min(num_computed, state.request.num_prompt_tokens)
            if self.kv.prefix_caching:
                output.prefix_queried += state.request.num_prompt_tokens
                output.prefix_hit += state.num_cached_tokens
        self.items.consume(state)
        self._note_items(state, True, now)

    def _advance(self, chunk: ScheduledChunk) -> None:
        state = chunk.state
        state.num_computed_tokens = chunk.end
        self.kv.register(state.request_id, state.chain, chunk.end)
        self.items.consume(state)

    def _append(self, state: RequestState, token: int, logprobs: RawLogprobs | None, now: float) -> None:
        self._note_token(state, now)
        try:
            text, reason = state.request.output.append(token)
        except Exception:
            logger.exception("request %s: its output text failed", state.request.name)
            self._finish(state, FinishReason.ERROR, InternalError("the output could not be turned into text"))
            return
        state.request.output_token_ids.append(token)
        if reason is None and state.num_tokens >= self.limits.max_model_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            text += state.request.output.flush()
        told = () if logprobs is None else (logprobs,)
        self._events.append(request_events.new_tokens(state, (token,), text, told))
        if reason is not None:
            self.latencies.whole.append(now - state.request.arrival)
            self._finish(state, reason)

    def _note_token(self, state: RequestState, now: float) -> None:
        if state.first_token_at is None or state.last_token_at is None:
            state.first_token_at = now
            self.latencies.first_token.append(now - state.request.arrival)
        else:
            self.latencies.between_tokens.append(now - state.last_token_at)
        state.last_token_at = now

    def _end_output(self, state: RequestState, text: str, reason: FinishReason) -> None:
        """A resumed request whose output had ended before it was submitted here."""
        if text:
            self._events.append(request_events.new_tokens(state, (), text))
        self._finish(state, reason)

    def _finish(self, state: RequestState, reason: FinishReason, error: RequestError | None = None) -> None:
        if state.status is RequestStatus.FINISHED:
            return
        if state.status is RequestStatus.RUNNING:
            self._running.remove(state)
        else:
            self._waiting.discard(state)
        del self._states[state.request.key]
        self._by_key.discard(state)
        state.status = RequestStatus.FINISHED
        self._deadlines.ended()
        self.kv.free(state.request_id)
        self._swapper.free(state)
        self.items.finish(state)
        self._events.append(request_events.finished(state, reason, error))
