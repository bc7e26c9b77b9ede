"""Requests in flight, one for every choice of a call: state machine, output queue, and its memory."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace

from triptych.base.delta import Delta
from triptych.base.errors import Overloaded, RequestError
from triptych.base.log import log_fields, short
from triptych.base.metrics import ProxyMetrics
from triptych.base.types import Usage
from triptych.protos.pd_pb2 import Admitted
from triptych.proxy.call.chat import ChatCall, Done, ItemTiming, Output
from triptych.proxy.call.validation import name_field, name_prompt
from triptych.proxy.ports import Link
from triptych.proxy.quotas.call_context import CallDelivery
from triptych.proxy.quotas.quota import Quota, QuotaExceeded
from triptych.proxy.requests.lifecycle import Lifecycle
from triptych.proxy.requests.recorder import RequestTrace, RequestView
from triptych.proxy.splitter import SplitRequest
from triptych.proxy.workers import Binding

logger = logging.getLogger(__name__)


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


def draw_request_id() -> str:
    """A random name that is never drawn twice and cannot be guessed."""
    return secrets.token_hex(16)


@dataclass(slots=True)
class InFlightRequest:
    """One choice of a call. `deadline` is a moment of the proxy's clock; `order` is the order of arrival."""

    call: ChatCall
    order: int
    deadline: float
    #: Its name in the proxy and at the workers, unlike the client's label.
    request_id: str = field(default_factory=draw_request_id)
    output: OutputQueue = field(default_factory=OutputQueue)
    binding: Binding | None = None
    split: SplitRequest | None = None
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    link: Link | None = None
    #: The decode worker of the attempt that is to take over.
    successor_link: Link | None = None
    #: The PD worker of an attempt that was given up; it may still hold the request.
    stale_link: Link | None = None
    #: PD workers that have just refused the request.
    refused_by: set[str] = field(default_factory=set)
    #: Fewest tokens of prompt and output that a PD worker has to take, as far as is known.
    min_tokens: int = 0
    #: When the store's look-up began, by the proxy's clock.
    looked_up: float = 0.0
    first_token: float | None = None
    #: The contexts that go to the workers, where the proxy has traces.
    trace: RequestTrace | None = None
    #: They get its events.
    views: tuple[RequestView, ...] = ()
    #: Taken while it is handed to a worker. Choices of one call share it where each message would be large.
    sending: AbstractAsyncContextManager[object] = field(default_factory=nullcontext)

    def seconds_left(self, now: float) -> float:
        """Until its deadline; a moment where that has passed."""
        return max(self.deadline - now, 0.1)

    @property
    def name(self) -> str:
        """For logs: the client's label, and the id that worker logs have too."""
        return f"{self.call.label} ({self.request_id})"

    @property
    def log_extra(self) -> dict[str, object]:
        """The fields of log records about the request."""
        fields = log_fields(request_id=self.request_id, label=self.call.label, attempt=self.lifecycle.attempt)
        if self.trace is not None and self.trace.recording:
            fields["trace_id"] = self.trace.trace_id
        return fields

    @property
    def resumed(self) -> bool:
        """Whether it has been under way before: it goes before new requests."""
        return self.lifecycle.attempt > 1 or self.call.continues

    @property
    def bound(self) -> Binding:
        """The binding of a request that has begun."""
        assert self.binding is not None
        return self.binding

    @property
    def content(self) -> SplitRequest:
        """The split of a request that has begun."""
        assert self.split is not None
        return self.split

    @property
    def submit_size(self) -> int:
        """About how many characters a message with it has: the long ones of a call's texts."""
        call = self.call
        source = call.encoder.source if call.encoder is not None else ""
        size = len(self.content.messages) + len(call.prompt or "") + len(call.template.tools)
        return size + (len(source) if isinstance(source, str | tuple) else 0)

    @property
    def pd_address(self) -> str:
        """The PD worker that has it; empty where none has."""
        return self.link.address if self.link is not None else ""

    def emit(self, output: Output) -> None:
        """Sends what is no token to the client; the end goes with where the items came from."""
        if isinstance(output, Done):
            keys = [] if self.split is None else [slot.mm_hash for slot in self.split.items]
            items = self.lifecycle.items
            output.timings.items = [ItemTiming(short(key), items[key].origin or "store") for key in keys]
        self.output.put(output)

    def fail(self, error: RequestError) -> None:
        """Ends the client's stream; a worker's error names the field that the client sent."""
        error = name_field(error, self.call.sampling.output_format)
        self.output.fail(name_prompt(error, self.call.prompt_param))


@dataclass(slots=True)
class Choices:
    """The choices of one call (`n`), in order: they share media, deadline, one queue and one end."""

    requests: list[InFlightRequest]
    output: OutputQueue
    started: float
    status: int = 499
    #: Where the call came in, for the metrics.
    route: str = "other"

    @property
    def first(self) -> InFlightRequest:
        """The request that the shared parts are made for."""
        return self.requests[0]

    @property
    def prompt_tokens(self) -> int:
        return max(len(request.lifecycle.prompt_token_ids or ()) for request in self.requests)

    @property
    def completion_tokens(self) -> int:
        return sum(len(request.lifecycle.output_token_ids) for request in self.requests)

    @property
    def encoded_rows(self) -> int:
        """Rows of the items that were encoded for the call; none of those that the store or a worker had."""
        return sum(
            item.plan.rows
            for request in self.requests
            for item in request.lifecycle.items.values()
            if item.origin == "encoded" and item.plan is not None
        )

    @property
    def first_token(self) -> float | None:
        """When the first token of all choices came."""
        tokens = [request.first_token for request in self.requests if request.first_token is not None]
        return min(tokens, default=None)

    def report(self, metrics: ProxyMetrics, now: float, model: str) -> None:
        """Counts the call that has ended, and logs one line of it; `model` is the name of what served it."""
        if self.first.call.internal:
            return
        seconds = now - self.started
        metrics.requests.labels(str(self.status), self.route).inc()
        metrics.duration.observe(seconds)
        if (first_token := self.first_token) is not None:
            metrics.time_to_first_token.observe(first_token - self.started)
        self._log(seconds, model)

    def _log(self, seconds: float, model: str) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        first = self.first
        items = len(first.split.items) if first.split is not None else 0
        logger.info(
            "request %s: status %d, model %s, %d prompt tokens, %d completion tokens, %d items, "
            "%d choices, %.3f s, tenant %s",
            first.name,
            self.status,
            model or "-",
            self.prompt_tokens,
            self.completion_tokens,
            items,
            len(self.requests),
            seconds,
            first.call.tenant or "-",
            extra=first.log_extra
            | log_fields(
                status=self.status,
                model=model,
                tenant=first.call.tenant,
                prompt_tokens=self.prompt_tokens,
                completion_tokens=self.completion_tokens,
                items=items,
                choices=len(self.requests),
                seconds=round(seconds, 3),
            ),
        )


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
        return 0
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
