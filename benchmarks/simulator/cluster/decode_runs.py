"""The PD worker's real scheduler, which also takes runs of decode steps at once where nothing can change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from triptych.pd_worker.core.chunks import ChunkCutter
from triptych.pd_worker.core.items import ItemTracker
from triptych.pd_worker.core.kv_cache.manager import KVCacheManager
from triptych.pd_worker.core.outputs import (
    EngineEvent,
    ModelRunnerOutput,
    NewTokens,
    RawLogprobs,
    ScheduledChunk,
    SchedulerOutput,
)
from triptych.pd_worker.core.request import RequestState
from triptych.pd_worker.core.scheduler import Latencies, Scheduler, SchedulerLimits
from triptych.types import FinishReason


class LengthText:
    """An output of `length` tokens without text. `token` is what it is made of."""

    __slots__ = ("count", "finished", "length", "token")

    def __init__(self, length: int, token: int) -> None:
        self.length = length
        self.token = token
        self.count = 0
        self.finished: FinishReason | None = None

    @property
    def left(self) -> int:
        return self.length - self.count

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        self.count += 1
        if self.count >= self.length:
            self.finished = FinishReason.LENGTH
        return "", self.finished

    def flush(self) -> str:
        return ""


class RunTokens(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one request from one or several steps, in the place of `NewTokens`."""

    request_id: str
    attempt: int
    position: int
    token_ids: list[int]


#: What tells of new tokens.
TOKENS = (NewTokens, RunTokens)


class _QuickCutter(ChunkCutter):
    """No block table where no runner reads it."""

    def cut(self, state: RequestState, end: int) -> ScheduledChunk:
        start, request = state.num_computed_tokens, state.request
        prompt = len(request.prompt_token_ids)
        if start < prompt:
            return super().cut(state, end)
        samples = end == prompt + len(request.output_token_ids)
        return ScheduledChunk(state, start, end - start, (), (), samples)


class RunningScheduler(Scheduler):
    """After `quiet` steps, which just decode, the next ones are alike until something comes in.

    Between them no request starts, since what keeps it waiting (a slot, room, blocks, an item) can change
    only by a request's end, a transfer or a message; free blocks only grow fewer.

    `quick` leaves out what no decision depends on (text, block tables for a runner, latencies for metrics):
    most of a step's time. Without it everything is the plain scheduler's.
    """

    def __init__(
        self, limits: SchedulerLimits, kv: KVCacheManager, items: ItemTracker, *, quick: bool = True
    ) -> None:
        super().__init__(limits, kv, items)
        self._quick = quick
        if quick:
            self._chunks = _QuickCutter(kv, items)

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> list[EngineEvent]:
        self.latencies = Latencies()
        return super().update(output, result, now)

    def _grow(self, state: RequestState, output: SchedulerOutput) -> bool:
        # The block of the newest token is there already unless that is the first of a block.
        if self._quick and state.num_computed_tokens % self.kv.block_size:
            return True
        return super()._grow(state, output)

    def _advance(self, chunk: ScheduledChunk) -> None:
        state, start = chunk.state, chunk.start
        if not self._quick or chunk.count > 1 or start < len(state.request.prompt_token_ids):
            super()._advance(chunk)
            return
        state.num_computed_tokens = end = start + 1
        if end % self.kv.block_size == 0:
            self.kv.register(state.request_id, state.chain, end)

    def _append(self, state: RequestState, token: int, logprobs: RawLogprobs | None, now: float) -> None:
        if not self._quick:
            super()._append(state, token, logprobs, now)
            return
        if state.first_token_at is None:
            state.first_token_at = now
        state.last_token_at = now
        # Neither `cast` nor a check: this runs for every token that is not of a run.
        events: list[Any] = self._events
        request: Any = state.request
        output, ids = request.output, request.output_token_ids
        events.append(RunTokens(request.request_id, request.attempt, len(ids), [token]))
        ids.append(token)
        output.count += 1
        known = len(request.prompt_token_ids) + len(ids)
        if output.count >= output.length or known >= self.limits.max_model_len:
            self._finish(state, FinishReason.LENGTH)

    @property
    def running(self) -> list[RequestState]:
        """The running batch, in its order."""
        return self._running

    def quiet(self, output: SchedulerOutput, events: list[EngineEvent]) -> bool:
        """Whether the step just updated was a plain decode of the whole batch."""
        chunks = output.chunks
        return (
            len(chunks) == len(self._running) == len(events)
            and not output.evicted
            and not output.preempted
            and all(chunk.start >= len(chunk.state.request.prompt_token_ids) for chunk in chunks)
            and all(type(event) in TOKENS for event in events)
        )

    @property
    def alone(self) -> bool:
        """Whether every request decodes: the next step can then be nothing but a plain decode of all."""
        return (
            not self._waiting
            and 0 < len(self._running) <= self.limits.max_num_batched_tokens
            and all(state.is_decoding for state in self._running)
        )

    def room(self, before: Callable[[int], float]) -> int:
        """Steps of plain decode that end no request, take no block that is not free, and meet no deadline.

        `before` gives the earliest moment at which step i (from 0) begins.
        """
        steps = min(
            min(output_of(state).left, self.limits.max_model_len - state.num_tokens)
            for state in self._running
        )
        steps -= 1
        deadline = self.next_deadline()
        while steps > 0 and deadline is not None and before(steps - 1) >= deadline:
            steps //= 2
        while steps > 0 and self._new_blocks(steps) > self.kv.num_free:
            steps //= 2
        return steps

    def _new_blocks(self, steps: int) -> int:
        size = self.kv.block_size
        known = [state.num_tokens - 2 for state in self._running]
        return sum((tokens + steps) // size - tokens // size for tokens in known)

    def run_on(self, steps: int, now: float) -> list[RunTokens]:
        """What `steps` times `schedule` and `update` would do, the last at `now`."""
        told: list[RunTokens] = []
        changes: list[tuple[int, bool, int, RequestState]] = []
        size = self.kv.block_size
        for rank, state in enumerate(self._running):
            known, output = state.num_tokens, output_of(state)
            for step in range(-(known - 1) % size, steps, size):
                changes.append((step, False, rank, state))
            for step in range(-known % size, steps, size):
                changes.append((step, True, rank, state))
            tokens = [output.token] * steps
            ids = state.request.output_token_ids
            told.append(RunTokens(state.request.request_id, state.request.attempt, len(ids), tokens))
            ids += tokens
            output.count += steps
            state.num_computed_tokens += steps
            state.last_token_at = now
        # In the order of the steps: which cached blocks go for new ones depends on it.
        for step, computed, _, state in sorted(changes, key=lambda change: change[:3]):
            known = state.num_computed_tokens + 1 - steps + step
            if computed:
                self.kv.register(state.request_id, state.chain, known)
            else:
                grown = self.kv.grow(state.request_id, known)
                assert grown, "a run of steps begins only where its blocks are free"
        self._step += steps
        return told


def output_of(state: RequestState) -> LengthText:
    """The output that `LengthText` counts."""
    output = state.request.output
    assert isinstance(output, LengthText)
    return output
