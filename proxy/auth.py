"""The door in front of HTTP and gRPC: whose key it is, and whether that key may use more."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, Protocol

import grpc
from grpc import aio
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.errors import RateLimited, RequestError, Unauthorized
from triptych.metrics import ProxyMetrics
from triptych.proxy.keys import Principal
from triptych.proxy.limits import PrincipalLimits
from triptych.proxy.openai_replies import error_body

log = logging.getLogger(__name__)

#: What answers without a key: whether the process lives and serves, and nothing else.
OPEN_PATHS = frozenset({"/health", "/ready"})
_HEALTH_SERVICE = "/grpc.health.v1.Health/"
_SCHEME = "bearer "


class KeyFinder(Protocol):
    """What the door asks of a `KeyRing`."""

    def find(self, key: bytes) -> Principal | None: ...


class Door:
    """Keys, limits and what is counted of refusals; one for both front doors."""

    def __init__(self, keys: KeyFinder, limits: PrincipalLimits, metrics: ProxyMetrics) -> None:
        self._keys = keys
        self.limits = limits
        self._metrics = metrics

    def principal(self, authorization: bytes) -> Principal:
        """Whose key the header's value holds; Unauthorized when it opens nothing."""
        scheme, key = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :].strip()
        if scheme.lower() != _SCHEME.encode() or not key:
            self._metrics.refusals.labels("api_key").inc()
            raise Unauthorized("no API key was given: send the header Authorization: Bearer YOUR_KEY")
        principal = self._keys.find(key)
        if principal is None:
            self._metrics.refusals.labels("api_key").inc()
            raise Unauthorized("the API key is not valid here: ask this server's operator for one")
        return principal

    def limited(self, principal: Principal, error: RateLimited) -> None:
        """One line of log and one count for a request above its key's limits."""
        limit = error.message.partition(":")[0]
        self._metrics.refusals.labels(limit).inc()
        log.info("a request of %s was refused: %s", principal.id, limit)


class HttpDoor:
    """ASGI middleware: every path but `/health` and `/ready` needs a key; every POST counts."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the door knows no {scope['type']} connections")
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            principal = self._door.principal(_authorization(scope))
        except Unauthorized as error:
            await _reply(error, scope, receive, send)
            return
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            # Left when the application has returned: after the reply's last byte, or the client's end.
            async with self._door.limits.admit(principal):
                await self._app(scope, receive, send)
        except RateLimited as error:
            self._door.limited(principal, error)
            await _reply(error, scope, receive, send)


def _authorization(scope: Scope) -> bytes:
    """The header's value; empty when there is none, or when two contradict each other."""
    values = {value for name, value in scope["headers"] if name == b"authorization"}
    return bytes(values.pop()) if len(values) == 1 else b""


async def _reply(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(math.ceil(error.retry_after), 1))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    await JSONResponse(error_body(error), status_code=error.status, headers=headers)(scope, receive, send)


class GrpcDoor(aio.ServerInterceptor):  # type: ignore[misc]
    """The same for gRPC: metadata `authorization`; health checks are free."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH_SERVICE):
            return handler
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        return _guarded(handler, self._door, given if isinstance(given, bytes) else given.encode())


def _guarded(handler: Any, door: Door, authorization: bytes) -> Any:
    """The handler behind the door. A call with a streamed reply is a request that counts."""

    async def one(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
        try:
            door.principal(authorization)
        except Unauthorized as error:
            await _abort(context, error)
        return await handler.unary_unary(request, context)

    async def stream(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        principal: Principal | None = None
        try:
            principal = door.principal(authorization)
            async with (
                door.limits.admit(principal),
                aclosing(handler.unary_stream(request, context)) as replies,
            ):
                async for reply in replies:
                    yield reply
        except RateLimited as error:
            if principal is not None:
                door.limited(principal, error)
            await _abort(context, error)
        except Unauthorized as error:
            await _abort(context, error)

    forms = (handler.request_deserializer, handler.response_serializer)
    if handler.request_streaming:
        raise TypeError("the front door has no calls with streamed requests")
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, *forms)
    return grpc.unary_unary_rpc_method_handler(one, *forms)


async def _abort(context: aio.ServicerContext[Any, Any], error: RequestError) -> NoReturn:
    if error.retry_after is not None:
        context.set_trailing_metadata((("retry-after", str(max(math.ceil(error.retry_after), 1))),))
    await context.abort(grpc.StatusCode[error.grpc_status], error.message)
    raise AssertionError("abort returns never")
