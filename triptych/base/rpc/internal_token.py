"""The cluster's internal token: what it signs, and the interceptors that send and check it."""

from __future__ import annotations

import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from grpc import aio

from triptych.base.types import WorkerInfo

Q = TypeVar("Q")


R = TypeVar("R")


TOKEN_HEADER = "authorization"


#: Calls without a token: they say whether the process serves, and its load to who knows its incarnation.
_OPEN_PATH = "/grpc.health."


_REFUSAL = "the call does not carry the cluster's internal token"


_DIGEST = "sha256"


class InternalToken:
    """The token as lines: the first one is sent and signs, every one of them is accepted.

    There are two while the token is rotated.
    """

    def __init__(self, tokens: str) -> None:
        lines = [token.encode() for token in tokens.split("\n")]
        #: The header's value in a client's calls.
        self.header = "Bearer " + tokens.partition("\n")[0]
        self._accepted = tuple(b"Bearer " + token for token in lines)
        self._keys = tuple(hmac.digest(token, b"triptych internal key 1", _DIGEST) for token in lines)

    def admits(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
        """Whether a call with this metadata carries the token, once. Compares in constant time."""
        values = [value for name, value in metadata or () if name == TOKEN_HEADER]
        if len(values) != 1:
            return False
        value = values[0].encode() if isinstance(values[0], str) else values[0]
        return any([hmac.compare_digest(header, value) for header in self._accepted])

    def signed(self, info: WorkerInfo) -> WorkerInfo:
        """The registration with its signature, an HMAC over all its fields."""
        return replace(info, proof=_signature(self._keys[0], info))

    def has_signed(self, info: WorkerInfo) -> bool:
        """Whether the writer of this registration, as it is, knows the token."""
        try:
            given = info.proof.encode()
            return any([hmac.compare_digest(_signature(key, info).encode(), given) for key in self._keys])
        except (TypeError, ValueError, AttributeError):
            return False  # fields that no worker of ours writes


def _signature(key: bytes, info: WorkerInfo) -> str:
    fields = replace(info, proof="").written
    if not info.kind:
        del fields["kind"]  # workers of releases without it sign without it
    content = json.dumps(fields, sort_keys=True).encode()
    return hmac.digest(key, b"triptych 1 registration\0" + content, _DIGEST).hex()


class TokenCheck(aio.ServerInterceptor):
    """A server interceptor that refuses calls without the internal token, before a message is read."""

    def __init__(self, token: InternalToken) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Q, R] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Q, R] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_PATH):
            return handler
        return handler if self._token.admits(handler_call_details.invocation_metadata) else _refusal()


def _refusal() -> grpc.RpcMethodHandler[Q, R]:
    async def refuse(_: AsyncIterator[Q], context: aio.ServicerContext[Q, R]) -> AsyncIterator[R]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)
        yield b""

    # For calls of every kind: a handler of a stream does not read the message before it refuses.
    return grpc.stream_stream_rpc_method_handler(refuse)


def token_interceptors(token: InternalToken) -> list[aio.ClientInterceptor]:
    """Client interceptors that send the token with every call but health checks."""

    def sending(details: aio.ClientCallDetails) -> aio.ClientCallDetails:
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        if method.startswith(_OPEN_PATH):
            return details
        metadata = aio.Metadata(*(details.metadata or ()), (TOKEN_HEADER, token.header))
        return aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )

    async def intercept(self: object, continuation: Any, details: aio.ClientCallDetails, request: Any) -> Any:
        return await continuation(sending(details), request)

    # Each kind of call has a base of its own, whose one abstract method has a name of its own.
    return [
        type(base.__name__, (base,), dict.fromkeys(base.__abstractmethods__, intercept))() for base in _KINDS
    ]


_KINDS: tuple[Any, ...] = (
    aio.UnaryUnaryClientInterceptor,
    aio.UnaryStreamClientInterceptor,
    aio.StreamUnaryClientInterceptor,
    aio.StreamStreamClientInterceptor,
)
