"""Runs of decode steps in which nothing can change, applied to the scheduler at once.

For a simulator: with `Scheduler(count_only=True)`, outputs of a known length and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triptych.pd_worker.core import request_events
from triptych.pd_worker.core.outputs import SchedulerOutput
from triptych.pd_worker.core.request import RequestState
from triptych.pd_worker.core.request_events import NewTokens
from triptych.pd_worker.core.scheduler import Scheduler
from triptych.types import FinishReason


class CountedOutput:
    """An output of `length` tokens without text; every token is `token`."""

    __slots__ = ("count", "finished", "length", "token")

    def __init__(self, length: int, token: int) -> None:
        self.length = length
        self.token = token
        self.count = 0
        self.finished: FinishReason | None = None

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        self.count += 1
        if self.count >= self.length:
            self.finished = FinishReason.LENGTH
        return "", self.finished

    def flush(self) -> str:
        return ""


class DecodeRuns:
    """Plain decode steps of a scheduler whose requests all have a `CountedOutput`.

    Once a plain decode step is scheduled the next ones are alike until a message comes in: no request starts,
    since what keeps it waiting (a slot, room, blocks, an item) changes only when a request ends, a transfer
    ends or a message comes, and free blocks only become fewer.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._block_size = scheduler.kv.block_size

    def is_plain(self, output: SchedulerOutput) -> bool:
        """Whether the step that was just scheduled is a decode of all running requests and nothing else."""
        chunks = output.chunks
        return (
            len(chunks) == self._scheduler.num_running
            and not output.evicted
            and not output.preempted
            and all([chunk.count == 1 and chunk.start >= chunk.state.num_prompt_tokens for chunk in chunks])
        )

    def steps_left(self, begins: Callable[[int], float]) -> int:
        """Plain decode steps up to the first that ends a request; they need only free blocks, and pass no
        deadline.

        `begins` is the earliest moment at which step i (from 0) begins.
        """
        scheduler = self._scheduler
        lengths = [state.num_prompt_tokens + len(state.output_token_ids) for state in scheduler.running]
        left = [output.length - output.count for output in self._outputs()]
        steps = min([*left, scheduler.limits.max_model_len - max(lengths, default=0)])
        deadline = scheduler.next_deadline()
        while steps > 0 and deadline is not None and begins(steps - 1) >= deadline:
            steps //= 2
        while steps > 0 and self._new_blocks(steps, lengths) > scheduler.kv.num_free:
            steps //= 2
        return steps

    def advance(self, steps: int, now: float) -> list[NewTokens]:
        """What `steps` times `schedule` and `update` would do, the last at `now`; one event per request.

        The ends of requests come with the next `update`. The first step may have been scheduled already.
        """
        events: list[NewTokens] = []
        ended: list[RequestState] = []
        most = self._scheduler.limits.max_model_len
        #: Step, whether a block is full then (or else a new one needed), order, request.
        changes: list[tuple[int, bool, int, RequestState]] = []
        size = self._block_size
        running = self._scheduler.running
        for rank, (state, output) in enumerate(zip(running, self._outputs(), strict=True)):
            known = state.num_tokens
            for step in range(-(known - 1) % size, steps, size):
                changes.append((step, False, rank, state))
            for step in range(-known % size, steps, size):
                changes.append((step, True, rank, state))
            tokens = [output.token] * steps
            state.output_token_ids += tokens
            output.count += steps
            state.num_computed_tokens += steps
            state.last_token_at = now
            events.append(request_events.new_tokens(state, tokens, ""))
            if output.count >= output.length or known + steps >= most:
                ended.append(state)
        # In the order of the steps, on which the choice of evicted blocks depends.
        kv = self._scheduler.kv
        changes.sort()  # no two have the same step, kind and rank
        for step, full, _, state in changes:
            known = state.num_computed_tokens + 1 - steps + step
            if full:
                kv.register(state.request_id, state.chain, known)
            else:
                grown = kv.grow(state.request_id, known)
                assert grown, "a run of steps begins only where its blocks are free"
        for state in ended:
            self._scheduler.end_output(state)
        return events

    def _new_blocks(self, steps: int, lengths: Sequence[int]) -> int:
        size = self._block_size
        return sum([(known - 2 + steps) // size - (known - 2) // size for known in lengths])

    def _outputs(self) -> list[CountedOutput]:
        """Of the running requests, in their order."""
        outputs = [state.request.output for state in self._scheduler.running]
        counted = [output for output in outputs if isinstance(output, CountedOutput)]
        assert len(counted) == len(outputs), "an output has no known length"
        return counted
