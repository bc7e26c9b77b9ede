"""The mutual challenge before internal calls: a worker's door, and a client's session with one worker.

`Authenticate` carries its challenge in the metadata and is answered with the worker's nonce and proof; the
calls after it carry identity, nonces and the client's proof. The door keeps no table of sessions: all that it
needs to verify a call is in the call. See `triptych.rpc.proofs` for the proofs.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from triptych.rpc.proofs import SIZE, InternalKey, age_of, client_nonce, identity_of, worker_nonce
from triptych.types import WorkerInfo

logger = logging.getLogger(__name__)

#: A client's proof is accepted for so long after the worker's nonce was drawn, and renewed after half of it.
SESSION_SECONDS = 600.0
AUTHENTICATE_SECONDS = 5.0
SERVICE, METHOD = "triptych.v1.WorkerAuth", "Authenticate"
#: Identity of the worker that is meant, nonce of the client.
CHALLENGE_HEADER = "x-triptych-challenge-bin"
#: The same, nonce of the worker, proof of the client.
SESSION_HEADER = "x-triptych-session-bin"
_PATH = f"/{SERVICE}/{METHOD}"
_FREE = ("/grpc.health.", _PATH)
_REFUSAL = "the call carries no valid proof of knowing the internal token"


class WorkerDoor(aio.ServerInterceptor):  # type: ignore[misc]
    """Lets in calls that prove to know the token, for the worker as which it is enrolled; health is free.

    Without a token everybody is let in.
    """

    def __init__(self, token: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._key = InternalKey(token) if token else None
        self._clock = clock
        self._identities: set[bytes] = set()

    def enrol(self, info: WorkerInfo) -> WorkerInfo:
        """From now on calls meant for this worker are let in; its registration, signed."""
        if self._key is None:
            return info
        self._identities.add(identity_of(info))
        return self._key.signed(info)

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """The service that answers challenges; none without a token."""
        if self._key is None:
            return ()
        # No message is read: nobody may fill our memory before the challenge.
        answer: Any = grpc.stream_unary_rpc_method_handler(self._authenticate)
        return (grpc.method_handlers_generic_handler(SERVICE, {METHOD: answer}),)

    async def _authenticate(self, _: AsyncIterator[bytes], context: aio.ServicerContext[Any, Any]) -> bytes:
        challenge = _metadata(context.invocation_metadata(), CHALLENGE_HEADER)
        identity, nonce = challenge[:SIZE], challenge[SIZE:]
        if self._key is None or len(nonce) != SIZE or identity not in self._identities:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the challenge is for another worker")
        assert self._key is not None
        own = worker_nonce(self._clock())
        return own + self._key.worker_proof(identity, nonce, own)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_FREE):
            return handler
        if self._admits(_metadata(handler_call_details.invocation_metadata, SESSION_HEADER)):
            return handler
        return _refusal()

    def _admits(self, session: bytes) -> bool:
        if self._key is None:
            return True
        if len(session) != 4 * SIZE:
            return False
        identity, client, worker, proof = (session[n : n + SIZE] for n in range(0, 4 * SIZE, SIZE))
        if not hmac.compare_digest(self._key.client_proof(identity, client, worker), proof):
            return False
        return identity in self._identities and age_of(worker, self._clock()) <= SESSION_SECONDS


def _metadata(metadata: Any, name: str) -> bytes:
    """The header's bytes; none where it is missing or there twice."""
    values = [value for key, value in metadata or () if key == name]
    return values[0] if len(values) == 1 and isinstance(values[0], bytes) else b""


def _refusal() -> Any:
    async def refuse(_: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)
        yield b""

    # For calls of every kind: a handler of a stream does not read the message before it refuses.
    return grpc.stream_stream_rpc_method_handler(refuse)


class WorkerSession:
    """A client's proofs to one worker, over one channel, from one event loop.

    Calls wait until the worker has proved to be the one that is meant. When the connection has been lost, or
    another incarnation is expected, it has to prove that again.
    """

    def __init__(self, token: str, info: WorkerInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = InternalKey(token)
        self._clock = clock
        self._channel: aio.Channel | None = None
        self._address = info.address
        self._identity = identity_of(info)
        self._session = b""
        self._renew_at = 0.0
        self._attempt: asyncio.Future[bytes] | None = None
        self._suspected = False
        self._looks: set[asyncio.Task[None]] = set()

    def expect(self, info: WorkerInfo) -> None:
        """Another process may stand at the address from now on."""
        identity = identity_of(info)
        if identity != self._identity:
            self._identity, self._session = identity, b""

    def bind(self, channel: aio.Channel) -> None:
        """The channel whose calls go through `interceptors`."""
        self._channel = channel

    def interceptors(self) -> list[aio.ClientInterceptor]:
        """Those that give every call its proof."""
        return _interceptors(self)

    async def prove(self) -> bool:
        """Whether the worker has proved itself, now or on this connection before."""
        try:
            await self.proof()
        except aio.AioRpcError:
            return False
        return True

    async def proof(self) -> bytes:
        """What a call carries. AioRpcError (UNAVAILABLE) when the worker cannot prove who it is."""
        self.look()
        if self._session and self._clock() < self._renew_at:
            return self._session
        if self._attempt is None:
            self._attempt = asyncio.ensure_future(self._renew())
            self._attempt.add_done_callback(self._attempted)
        # One attempt for all who wait: they would else fail one after another, each after its time.
        return await asyncio.shield(self._attempt)

    async def _renew(self) -> bytes:
        while True:
            identity = self._identity
            session = await self._authenticate(identity)
            if identity == self._identity:
                self._session, self._renew_at = session, self._clock() + SESSION_SECONDS / 2
                self._suspected = False
                return session

    def _attempted(self, attempt: asyncio.Future[bytes]) -> None:
        self._attempt = None
        if not attempt.cancelled():
            attempt.exception()  # whoever waited for it may be gone

    async def _authenticate(self, identity: bytes) -> bytes:
        assert self._channel is not None
        nonce = client_nonce()
        call: Any = self._channel.unary_unary(_PATH)
        metadata = ((CHALLENGE_HEADER, identity + nonce),)
        try:
            reply: bytes = await call(b"", metadata=metadata, timeout=AUTHENTICATE_SECONDS)
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise
            raise self._impostor(error.code().name) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise _unavailable("the channel is closed") from None
        worker, proof = reply[:SIZE], reply[SIZE:]
        if not hmac.compare_digest(self._key.worker_proof(identity, nonce, worker), proof):
            raise self._impostor("its proof is wrong")
        return b"".join((identity, nonce, worker, self._key.client_proof(identity, nonce, worker)))

    def _impostor(self, why: str) -> aio.AioRpcError:
        words = f"the process at {self._address} does not prove to be the worker that is registered there"
        if not self._suspected:
            logger.warning("%s (%s): it is sent nothing", words, why)
        self._suspected = True
        return _unavailable(words)

    def look(self) -> None:
        """Forgets the worker's proof when the connection over which it came is gone."""
        if self._channel is None or self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            self._session = b""

    def refused(self, proof: bytes) -> None:
        """The worker takes this proof no more."""
        if self._session == proof:
            self._session = b""

    def follow(self, call: Any, proof: bytes) -> None:
        """Looks at the connection and at the code when a stream has ended."""

        def ended(call: Any) -> None:
            self.look()
            task = asyncio.ensure_future(self._look_at_code(call, proof))
            self._looks.add(task)
            task.add_done_callback(self._looks.discard)

        call.add_done_callback(ended)

    async def _look_at_code(self, call: Any, proof: bytes) -> None:
        if await call.code() is grpc.StatusCode.UNAUTHENTICATED:
            self.refused(proof)


def _unavailable(words: str) -> aio.AioRpcError:
    return aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), words)


async def _with_proof(
    session: WorkerSession, details: aio.ClientCallDetails
) -> tuple[aio.ClientCallDetails, bytes]:
    """The call with the proof that it carries, which is empty where it needs none."""
    method = details.method.decode() if isinstance(details.method, bytes) else details.method
    if method.startswith(_FREE):
        session.look()  # this call may be the one that connects again
        return details, b""
    proof = await session.proof()
    metadata = aio.Metadata(*(details.metadata or ()), (SESSION_HEADER, proof))
    made = aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )
    return made, proof


def _interceptors(session: WorkerSession) -> list[aio.ClientInterceptor]:
    class UnaryUnary(aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            for _ in range(2):
                made, proof = await _with_proof(session, details)
                call = await continuation(made, request)
                try:
                    code = await call.code()
                except asyncio.CancelledError:
                    call.cancel()
                    raise
                if code is not grpc.StatusCode.UNAUTHENTICATED:
                    break
                session.refused(proof)
            return call

    class UnaryStream(aio.UnaryStreamClientInterceptor):  # type: ignore[misc]
        async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
            made, proof = await _with_proof(session, details)
            call = await continuation(made, request)
            session.follow(call, proof)
            return call

    class StreamStream(aio.StreamStreamClientInterceptor):  # type: ignore[misc]
        async def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
            made, proof = await _with_proof(session, details)
            call = await continuation(made, requests)
            session.follow(call, proof)
            return call

    return [UnaryUnary(), UnaryStream(), StreamStream()]
