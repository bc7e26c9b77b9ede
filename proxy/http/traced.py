"""Server spans around the endpoints that generate, as an ASGI middleware."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.base.tracing import attributes as names
from triptych.base.tracing.context import context_of
from triptych.base.tracing.server_span import CURRENT_SPAN, ServerSpan
from triptych.base.tracing.tracer import Tracer

#: The operation of each endpoint, as OpenTelemetry's conventions for generative models name it.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/audio/transcriptions": "generate_content",
    "/v1/audio/translations": "generate_content",
}


class TracedEndpoint:
    """One endpoint with a server span for each of its requests, which what it calls finds in CURRENT_SPAN.

    It wraps neither `receive` nor `send`: the reply's status comes from `HttpReply`, so no token passes here.
    """

    def __init__(self, endpoint: ASGIApp, path: str, tracer: Tracer) -> None:
        self._endpoint = endpoint
        self._path = path
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = ServerSpan(
            self._tracer,
            context_of(scope["headers"]),
            OPERATIONS[self._path],
            {names.HTTP_METHOD: "POST", names.HTTP_ROUTE: self._path},
        )
        token = CURRENT_SPAN.set(span)
        try:
            await self._endpoint(scope, receive, send)
        finally:
            CURRENT_SPAN.reset(token)
            span.end()
