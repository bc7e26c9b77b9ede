"""Server span: one client's request from the moment that it is let in, over HTTP or gRPC."""

from __future__ import annotations

from triptych.base.tracing import attributes as names
from triptych.base.tracing.attributes import Value
from triptych.base.tracing.context import SpanContext
from triptych.base.tracing.tracer import SpanKind, Tracer

#: HTTP statuses and gRPC codes that make a server's span an error; those of a client's mistake do not.
_RPC_ERRORS = frozenset((2, 4, 12, 13, 14, 15))


class ServerSpan:
    """The open span of a client's request. Without a sampled trace it holds a context and nothing else."""

    def __init__(
        self,
        tracer: Tracer,
        parent: SpanContext | None,
        operation: str,
        attributes: dict[str, Value],
    ) -> None:
        self._start = tracer.clock()
        self._span = tracer.start(operation, parent, kind=SpanKind.SERVER, at=self._start)
        self.context = self._span.get_span_context()
        self.recording = self._span.is_recording()
        self.tracer = tracer
        self._operation = operation
        self._model = ""
        self._error = ""
        self._status: dict[str, Value] = {}
        self._attributes: dict[str, Value] = attributes
        self._tokens = [0, 0, 0]
        self._reasons: list[str] = []

    def serves(self, model: str, attributes: dict[str, Value]) -> None:
        """The model that the request is for, and what it asks of it."""
        self._model = model
        self._attributes |= attributes

    def count(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """Adds one call's tokens; a request may be several calls."""
        for index, tokens in enumerate((prompt_tokens, cached_tokens, completion_tokens)):
            self._tokens[index] += tokens

    def finished(self, reason: str) -> None:
        """One answer is complete."""
        self._reasons.append(reason)

    def first_token(self, at: float) -> None:
        """A call's first token came at this moment of the clock; the earliest one counts."""
        self._attributes.setdefault(names.TIME_TO_FIRST_TOKEN, max(0.0, at - self._start))

    def http_status(self, status: int) -> None:
        self._status[names.HTTP_STATUS] = status
        if status >= 500:
            self._error = self._error or str(status)

    def rpc_status(self, code: int, name: str) -> None:
        self._status[names.RPC_STATUS] = code
        if code in _RPC_ERRORS:
            self._error = self._error or name

    def failed(self, error_type: str) -> None:
        """The request failed, as an error's code names it; the first one counts."""
        self._attributes.setdefault(names.ERROR_TYPE, error_type)

    def broken(self, error_type: str) -> None:
        """The request failed after its reply had begun, whose status does not show it."""
        self.failed(error_type)
        self._error = self._error or error_type

    def end(self) -> None:
        """Hands the span in."""
        if not self.recording:
            return
        model = {names.REQUEST_MODEL: self._model, names.RESPONSE_MODEL: self._model} if self._model else {}
        tokens: dict[str, Value] = dict(
            zip((names.INPUT_TOKENS, names.CACHED_TOKENS, names.OUTPUT_TOKENS), self._tokens, strict=True)
        )
        reasons = {names.FINISH_REASONS: tuple(self._reasons)} if self._reasons else {}
        self._span.update_name(f"{self._operation} {self._model}".rstrip())
        self._span.set_attributes(
            {
                names.OPERATION: self._operation,
                names.PROVIDER: names.PROVIDER_NAME,
                **self._attributes,
                **model,
                **(tokens if any(self._tokens) else {}),
                **reasons,
                **self._status,
            }
        )
        self.tracer.end(self._span, error=self._error)
