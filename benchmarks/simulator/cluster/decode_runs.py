"""Runs of decode steps in which nothing can change, applied to the scheduler at once.

Outputs have a known length, and no model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from triptych.pd_worker.core.outputs import SchedulerOutput
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
        """Plain decode steps before the first that ends a request; they need only free blocks, and pass no
        deadline.

        `begins` is the earliest moment at which step i (from 0) begins.
        """
        scheduler = self._scheduler
        lengths = [state.num_prompt_tokens + len(state.output_token_ids) for state in scheduler.running]
        left = [output.length - output.count for output in self._outputs()]
        steps = min([*left, scheduler.limits.max_model_len - max(lengths, default=0)]) - 1
        deadline = scheduler.next_deadline()
        while steps > 0 and deadline is not None and begins(steps - 1) >= deadline:
            steps //= 2
        while steps > 0 and self._new_blocks(steps, lengths) > scheduler.kv.num_free:
            steps //= 2
        return steps

    def advance(self, steps: int, now: float) -> list[str]:
        """What `steps` times `schedule` and `update` would do, the last at `now`; the ids of the requests.

        Each has `steps` tokens more. The first step may have been scheduled already.
        """
        advanced: list[str] = []
        kv, size = self._scheduler.kv, self._block_size
        for state, output in zip(self._scheduler.running, self._outputs(), strict=True):
            computed = state.num_computed_tokens
            end = state.num_computed_tokens = computed + steps
            if (end - 1) // size > (computed - 1) // size:
                grown = kv.grow(state.request_id, end)
                assert grown, "a run of steps begins only where its blocks are free"
            state.output_token_ids += [output.token] * steps
            if end // size > computed // size:
                kv.register(state.request_id, state.chain, end)
            output.count += steps
            state.last_token_at = now
            advanced.append(state.request.request_id)
        return advanced

    def _new_blocks(self, steps: int, lengths: Sequence[int]) -> int:
        size = self._block_size
        return sum([(known - 2 + steps) // size - (known - 2) // size for known in lengths])

    def _outputs(self) -> list[CountedOutput]:
        """Of the running requests, in their order."""
        return cast(list[CountedOutput], [state.request.output for state in self._scheduler.running])
