"""How our processes speak gRPC with each other: one set of channel options, one token check."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc import aio

#: Prompts and token ids travel here, media in small frames, embeddings never.
MAX_MESSAGE_BYTES = 80 << 20
#: Largest media frame of an encoder job.
MEDIA_FRAME_BYTES = 256 << 10
TOKEN_HEADER = "x-triptych-token"

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that was stopped or cut off is noticed within seconds, also on an idle stream.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    # A restarted worker is found again quickly.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Two servers on one port would share its calls in silence.
    ("grpc.so_reuseport", 0),
]


class _TokenCheck(aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls that do not carry the internal token; health checks are free."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc.health."):
            return handler
        given = dict(handler_call_details.invocation_metadata).get(TOKEN_HEADER, "")
        raw = given if isinstance(given, bytes) else given.encode()
        if hmac.compare_digest(raw, self._token):
            return handler
        return _refusal(handler)


def _refusal(handler: Any) -> Any:
    async def refuse(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "internal token missing or wrong")

    async def refuse_stream(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "internal token missing or wrong")
        yield None

    makers: dict[tuple[bool, bool], Any] = {
        (False, False): (grpc.unary_unary_rpc_method_handler, refuse),
        (False, True): (grpc.unary_stream_rpc_method_handler, refuse_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, refuse),
        (True, True): (grpc.stream_stream_rpc_method_handler, refuse_stream),
    }
    make, body = makers[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(body, handler.request_deserializer, handler.response_serializer)


def make_server(token: str = "", interceptors: Sequence[aio.ServerInterceptor] = ()) -> aio.Server:
    """An asyncio gRPC server that demands `token` (none: open) from every call but health checks."""
    checks = [_TokenCheck(token)] if token else []
    return aio.server(interceptors=[*checks, *interceptors], options=_OPTIONS)


def make_channel(address: str, token: str = "") -> aio.Channel:
    """A channel to a worker at `host:port` or `unix:path`, whose calls carry `token`."""
    interceptors = _client_interceptors(token) if token else []
    return aio.insecure_channel(address, options=_OPTIONS, interceptors=interceptors)


def _client_interceptors(token: str) -> list[aio.ClientInterceptor]:
    def with_token(details: aio.ClientCallDetails) -> aio.ClientCallDetails:
        metadata = aio.Metadata(*(details.metadata or ()), (TOKEN_HEADER, token))
        return aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )

    class UnaryUnary(aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            return await continuation(with_token(details), request)

    class UnaryStream(aio.UnaryStreamClientInterceptor):  # type: ignore[misc]
        async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
            return await continuation(with_token(details), request)

    class StreamStream(aio.StreamStreamClientInterceptor):  # type: ignore[misc]
        async def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
            return await continuation(with_token(details), requests)

    return [UnaryUnary(), UnaryStream(), StreamStream()]
