"""Requests in flight, one for every choice of a call, and the choices that one call has."""

from __future__ import annotations

import logging
import secrets
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from triptych.base.errors import RequestError
from triptych.base.log import log_fields, short
from triptych.base.metrics import ProxyMetrics
from triptych.proxy.call.chat import ChatCall, Done, ItemTiming, Output
from triptych.proxy.call.output_formats import name_field
from triptych.proxy.call.validation import name_prompt
from triptych.proxy.ports import Link
from triptych.proxy.requests.lifecycle import Lifecycle
from triptych.proxy.requests.output_queue import OutputQueue
from triptych.proxy.requests.recorder import RequestTrace, RequestView
from triptych.proxy.splitter import SplitRequest
from triptych.proxy.workers import Binding

logger = logging.getLogger(__name__)


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
        if adapter := self.first.call.adapter:
            metrics.adapter_requests.labels(self.first.call.model, adapter, str(self.status)).inc()
        metrics.duration.observe(seconds)
        if self.status == 200:
            # Of a vector or a score, when it is there: alerts divide by all that were answered.
            metrics.time_to_first_token.observe((self.first_token or now) - self.started)
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
