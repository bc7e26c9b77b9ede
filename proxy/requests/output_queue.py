"""Queues of output between the dispatcher and a client's connection, bounded in memory."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from triptych.base.delta import Delta
from triptych.base.errors import Overloaded, RequestError
from triptych.base.types import Usage
from triptych.protos.pd_pb2 import Admitted
from triptych.proxy.call.chat import Done, Output
from triptych.proxy.quotas.call_context import CallDelivery
from triptych.proxy.quotas.quota import Quota, QuotaExceeded


class OutputQueue:
    """Output of one call between the dispatcher and the client's connection. One reader.

    The reader is woken when `batch` outputs wait, and at the end of a choice. `memory` bounds what waits.
    """

    __slots__ = ("_batch", "_error", "_items", "_memory", "_maximum", "_waiter")

    def __init__(self, batch: int = 1, memory: ReplyMemory | None = None) -> None:
        self._batch = batch
        self._memory = memory
        #: Outputs that may wait before they are measured.
        self._maximum = memory.unmeasured if memory is not None else sys.maxsize
        self._items: list[Output] = []
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def empty(self) -> bool:
        return not self._items

    @property
    def paused(self) -> bool:
        """Whether output pauses until the client has taken some."""
        return self._memory is not None and self._memory.paused

    def put(self, output: Output) -> None:
        self._items.append(output)
        if len(self._items) > self._maximum and self._memory is not None:
            self._maximum = self._memory.measure(self._items)
        if self._waiter is not None and (len(self._items) >= self._batch or isinstance(output, Done)):
            self._wake()

    def fail(self, error: RequestError) -> None:
        """`drain` raises this once everything before it has been read."""
        self._error = error
        self._wake()

    async def drain(self) -> list[Output]:
        """All output since the last call, which the reader has passed on; waits for at least one."""
        memory = self._memory
        if memory is not None and memory.counts:
            memory.settle(self._items)
        while not self._items:
            if self._error is not None:
                error, self._error = self._error, None
                try:
                    raise error
                finally:
                    del error  # its traceback holds this frame: a cycle would keep the request's body
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        if memory is not None and memory.counts:
            memory.taken(items)
            self._maximum = memory.unmeasured
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ChoiceTally:
    """How many choices are still open, and the usage of those that have ended."""

    def __init__(self, choices: int) -> None:
        self.open = choices
        self.begun = False
        self._completion_tokens = 0
        self._cached_tokens: int | None = None

    def ended(self, usage: Usage) -> Usage:
        """Usage so far: the prompt counts once, and as cached only what every choice found cached."""
        self.open -= 1
        self._completion_tokens += usage.completion_tokens
        cached = self._cached_tokens
        self._cached_tokens = usage.cached_tokens if cached is None else min(cached, usage.cached_tokens)
        return Usage(usage.prompt_tokens, self._completion_tokens, self._cached_tokens)


class ChoiceQueue(OutputQueue):
    """Output of one choice: goes to the call's queue with the choice's index."""

    __slots__ = ("_index", "_shared", "_tally")

    def __init__(self, shared: OutputQueue, tally: ChoiceTally, index: int) -> None:
        super().__init__()
        self._shared = shared
        self._tally = tally
        self._index = index

    @property
    def paused(self) -> bool:
        return self._shared.paused

    def put(self, output: Output) -> None:
        tally = self._tally
        if isinstance(output, Delta):
            self._shared.put(Delta(output.text, output.token_ids, output.logprobs, self._index))
        elif isinstance(output, Done):
            usage = tally.ended(output.usage)
            done = replace(output, usage=usage, choice=self._index, final=tally.open == 0)
            self._shared.put(done)
        elif isinstance(output, Admitted) and not tally.begun:
            tally.begun = True
            self._shared.put(output)

    def fail(self, error: RequestError) -> None:
        self._shared.fail(error)


#: Memory that every call has from its beginning; more comes in such steps.
STEP = 64 << 10
#: Output of one stream that waits for its client before the PD workers are paused.
WINDOW = 4 << 20
#: Output that may come then even where the quota has no more, and the most in all where it has: what was
#: under way. A worker that cannot pause sends more.
LATE = 4 << 20
UNPAUSED = 16 << 20
#: Bytes that an output takes in memory, and each log-probability of it. Measured.
_DELTA_BYTES, _LOGPROB_BYTES = 192, 224


def output_bytes(output: Output) -> int:
    """About what an output takes in memory."""
    if not isinstance(output, Delta):
        return len(output.pooled) if isinstance(output, Done) else 0
    nbytes = _DELTA_BYTES + len(output.text)
    if output.logprobs:
        nbytes += sum([_LOGPROB_BYTES * (1 + len(position.top)) for position in output.logprobs])
    return nbytes


class ReplyMemory:
    """A hold of the quota of replies for one call, in steps. QuotaExceeded where not even one is free.

    A stream that its client does not read has its PD workers paused, above WINDOW or where the quota has no
    more, until the client has taken what waits. It ends where the workers do not stop. A reply in one piece
    cannot wait for its client: it ends where the quota has no more.
    """

    def __init__(
        self,
        quota: Quota,
        holder: str,
        *,
        whole: bool,
        logprobs: int | None = None,
        delivery: CallDelivery | None = None,
    ) -> None:
        self.hold = quota.hold(holder, STEP)
        each = _DELTA_BYTES + (0 if logprobs is None else _LOGPROB_BYTES * (1 + logprobs))
        #: Outputs that may wait before they are measured: of a client that reads fewer wait.
        self.unmeasured = STEP // each
        self._delivery = delivery
        self._whole = whole
        #: Bytes of a reply in one piece that have been read, of outputs that wait, and how many these are.
        self._read = self._waiting = self._measured = 0
        #: Something is held or counted, so that the reader's turns matter.
        self.counts = whole
        self.paused = False
        self._limit = 0
        #: Pauses the workers, or has them go on; ends the call.
        self.pause: Callable[[bool], None]
        self.end: Callable[[RequestError], None]
        self.forget()

    def forget(self) -> None:
        """The call has ended: nothing here refers to it any more."""
        self.pause, self.end = (lambda paused: None), (lambda error: None)

    def measure(self, waiting: Sequence[Output]) -> int:
        """Counts the outputs that wait; how many there may be before the next time."""
        self.counts = True
        self._count(waiting)
        self._cover(self._read + self._waiting + self._unsent)
        return len(waiting) + self.unmeasured

    def settle(self, waiting: Sequence[Output]) -> None:
        """The reader of a stream is back: its connection has all that it took before."""
        if self._whole or (self.paused and waiting):
            return
        self._count(waiting)
        used = self._waiting + self._unsent
        self.hold.remove(max((self.hold.amount - max(used, 1)) // STEP * STEP, 0))
        self.counts = bool(waiting) or self.hold.amount > STEP
        if self.paused:
            self.paused = False
            self.pause(False)

    def taken(self, outputs: Sequence[Output]) -> None:
        """The reader has these, and a reply in one piece keeps them."""
        if self._whole:
            self._count(outputs)
            self._read += self._waiting
            self._cover(self._read)
        self._waiting = self._measured = 0

    @property
    def _unsent(self) -> int:
        return 0 if self._delivery is None else self._delivery.unsent

    def _count(self, waiting: Sequence[Output]) -> None:
        self._waiting += sum(map(output_bytes, waiting[self._measured :]))
        self._measured = len(waiting)

    def _cover(self, used: int) -> None:
        more = -(-(used - self.hold.amount) // STEP) * STEP
        if more <= 0:
            return
        error: RequestError = Overloaded("the client does not read, and its PD worker does not wait")
        try:
            if self._whole or self.hold.amount + more <= (UNPAUSED if self.paused else WINDOW):
                self.hold.add(more)
                return
        except QuotaExceeded as exceeded:
            error = exceeded
        if self._whole or (self.paused and used > self._limit):
            self._limit = 1 << 62
            self.end(error)
        elif not self.paused:
            self.paused, self._limit = True, used + LATE
            self.pause(True)
