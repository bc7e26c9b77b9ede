"""A worker's side of the mutual challenge before internal calls.

`Authenticate` carries the client's challenge in the metadata and is answered with the worker's nonce and
proof; the calls after it carry identity, nonces and the client's proof. The worker keeps no table of
sessions: all that it needs to verify a call is in the call. See `triptych.base.rpc.proofs` for the proofs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

import grpc
from grpc import aio

from triptych.base.rpc.proofs import SIZE, InternalKeys, age_of, identity_of, worker_nonce
from triptych.base.types import WorkerInfo

Q = TypeVar("Q")
R = TypeVar("R")

#: A client's proof is accepted for so long after the worker's nonce was drawn, and renewed after half of it.
SESSION_SECONDS = 600.0
SERVICE, METHOD = "triptych.v1.WorkerAuth", "Authenticate"
AUTHENTICATE_PATH = f"/{SERVICE}/{METHOD}"
#: Identity of the worker that is meant, nonce of the client.
CHALLENGE_HEADER = "x-triptych-challenge-bin"
#: The same, nonce of the worker, proof of the client.
SESSION_HEADER = "x-triptych-session-bin"
#: Calls that need no proof begin so.
OPEN_PATHS = ("/grpc.health.", AUTHENTICATE_PATH)
_REFUSAL = "the call carries no valid proof of knowing the internal token"


class WorkerAuth(aio.ServerInterceptor):
    """A server interceptor that accepts only calls with a proof of the internal token; health needs none.

    Without a token it accepts every call.
    """

    def __init__(self, token: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = InternalKeys(token) if token else None
        self._clock = clock
        self._identities: set[bytes] = set()

    def add_worker(self, info: WorkerInfo) -> WorkerInfo:
        """Accepts calls meant for this worker from now on; its registration, signed."""
        if self._keys is None:
            return info
        self._identities.add(identity_of(info))
        return self._keys.signed(info)

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """The service that answers challenges; none without a token."""
        if self._keys is None:
            return ()
        # No message is read: a client without a proof cannot fill our memory.
        answer: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(self._authenticate)
        return (grpc.method_handlers_generic_handler(SERVICE, {METHOD: answer}),)

    async def _authenticate(
        self, _: AsyncIterator[bytes], context: aio.ServicerContext[bytes, bytes]
    ) -> bytes:
        challenge = _metadata(context.invocation_metadata(), CHALLENGE_HEADER)
        identity, nonce = challenge[:SIZE], challenge[SIZE:]
        if self._keys is None or len(nonce) != SIZE or identity not in self._identities:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the challenge is for another worker")
        assert self._keys is not None
        own = worker_nonce(self._clock())
        return own + self._keys.worker_proof(identity, nonce, own)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Q, R] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Q, R] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_PATHS):
            return handler
        if self._admits(_metadata(handler_call_details.invocation_metadata, SESSION_HEADER)):
            return handler
        return _refusal()

    def _admits(self, session: bytes) -> bool:
        if self._keys is None:
            return True
        if len(session) != 4 * SIZE:
            return False
        identity, client, worker, proof = (session[n : n + SIZE] for n in range(0, 4 * SIZE, SIZE))
        if not self._keys.admits(identity, client, worker, proof):
            return False
        return identity in self._identities and age_of(worker, self._clock()) <= SESSION_SECONDS


def _metadata(metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> bytes:
    """The header's bytes; none where it is missing or there twice."""
    values = [value for key, value in metadata or () if key == name]
    return values[0] if len(values) == 1 and isinstance(values[0], bytes) else b""


def _refusal() -> grpc.RpcMethodHandler[Q, R]:
    async def refuse(_: AsyncIterator[Q], context: aio.ServicerContext[Q, R]) -> AsyncIterator[R]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)
        yield b""

    # For calls of every kind: a handler of a stream does not read the message before it refuses.
    return grpc.stream_stream_rpc_method_handler(refuse)
