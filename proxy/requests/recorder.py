"""Recorder of requests: their only observer. It hands every event to the views of its request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from triptych.base.errors import RequestError
from triptych.base.metrics import ProxyMetrics
from triptych.base.tracing.attributes import sampling
from triptych.base.tracing.server_span import ServerSpan
from triptych.proxy.events import CallEnded, Ended, JobReady
from triptych.proxy.requests.instructions import Submit
from triptych.proxy.requests.request import Choices, InFlightRequest
from triptych.proxy.requests.views import Event, RequestTrace, RequestView

_ENDED = Ended()


class CallObserver(Protocol):
    """Whatever watches the calls of one proxy."""

    def opened(self, choices: Choices) -> RequestView:
        """A call is admitted; the view gets the events of its first choice."""

    def closed(self, choices: Choices, failure: RequestError | None) -> None:
        """A call has ended; `failure`: with this error."""

    def encoded(self, end: JobReady) -> None:
        """An encoder job has ended with its item in the store."""


class Recorder:
    """The recorder of one proxy. `clock` is the proxy's."""

    def __init__(
        self,
        metrics: ProxyMetrics,
        clock: Callable[[], float],
        model_name: Callable[[str], str],
        calls: CallObserver | None = None,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._model_name = model_name
        self._calls = calls

    def open(self, choices: Choices, span: ServerSpan | None) -> None:
        """A call is admitted; `span`: its requests are traced under this one."""
        first = choices.first
        if span is not None:
            for index, request in enumerate(choices.requests):
                request.trace = RequestTrace(span, request.request_id, index)
                if span.recording:
                    request.views = (request.trace,)
            if span.recording:
                model = self._model_name(first.call.model)
                span.serves(model, sampling(first.call.sampling, len(choices.requests)))
        if self._calls is not None:
            first.views = (*first.views, self._calls.opened(choices))

    def record(self, request: InFlightRequest, event: Event) -> None:
        """One event of a request, now."""
        if type(event) is Submit and event.attempt > 1:
            self._metrics.resumes.labels("resume" if event.resume else "resubmit").inc()
        if views := request.views:
            now, link = self._clock(), request.link
            for view in views:
                view.observe(event, now, "" if link is None else link.address, request.lifecycle.items)

    def encoded(self, end: JobReady) -> None:
        """An encoder job has ended with its item in the store."""
        if self._calls is not None:
            self._calls.encoded(end)

    def close(self, choices: Choices, failure: RequestError | None) -> None:
        """A call has ended; `failure`: with this error."""
        for request in choices.requests:
            self.record(request, _ENDED)
        if choices.first.trace is not None:  # no other view shows it
            tokens = choices.prompt_tokens, choices.completion_tokens
            self.record(choices.first, CallEnded(choices.status, *tokens, choices.first_token))
        choices.report(self._metrics, self._clock())
        if self._calls is not None:
            self._calls.closed(choices, failure)
