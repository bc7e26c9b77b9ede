"""A client's side of the mutual challenge before internal calls: its session with one worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import TypeVar

import grpc
from grpc import aio

from triptych.base.rpc.proofs import SIZE, InternalKeys, client_nonce, identity_of
from triptych.base.rpc.server_auth import (
    AUTHENTICATE_PATH,
    CHALLENGE_HEADER,
    OPEN_PATHS,
    SESSION_HEADER,
    SESSION_SECONDS,
)
from triptych.base.types import WorkerInfo

Q = TypeVar("Q")
R = TypeVar("R")
Requests = AsyncIterable[Q] | Iterable[Q]

logger = logging.getLogger(__name__)

AUTHENTICATE_SECONDS = 5.0


class WorkerSession:
    """A client's authenticated session with one worker, over one channel, from one event loop.

    Calls wait until the worker has proved to be the one that is meant. When the connection has been lost, or
    another incarnation is expected, it has to prove that again.
    """

    def __init__(self, token: str, info: WorkerInfo, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = InternalKeys(token)
        self._clock = clock
        self._channel: aio.Channel | None = None
        self._address = info.address
        self._identity = identity_of(info)
        self._session = b""
        self._renew_at = 0.0
        self._attempt: asyncio.Future[bytes] | None = None
        self._suspected = False
        self._checks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    def expect(self, info: WorkerInfo) -> None:
        """The worker at the address is this one from now on, which may be another process than before."""
        identity = identity_of(info)
        if identity != self._identity:
            self._identity, self._session = identity, b""

    def bind(self, channel: aio.Channel) -> None:
        """The channel whose calls go through `interceptors`."""
        self._channel = channel

    def interceptors(self) -> list[aio.ClientInterceptor]:
        """Client interceptors that add the proof to every call."""
        return _interceptors(self)

    async def prove(self) -> bool:
        """Whether the worker has authenticated itself, now or on this connection before."""
        try:
            await self.proof()
        except aio.AioRpcError:
            return False
        return True

    async def proof(self) -> bytes:
        """The proof that a call carries. AioRpcError (UNAVAILABLE) when the worker has none of its own."""
        self.check_connection()
        if self._session and self._clock() < self._renew_at:
            return self._session
        if self._attempt is None:
            self._attempt = asyncio.ensure_future(self._renew())
            self._attempt.add_done_callback(self._attempted)
        # One attempt for all calls that wait: they would else fail one after another, each after its time.
        return await asyncio.shield(self._attempt)

    async def _renew(self) -> bytes:
        while True:
            identity = self._identity
            session = await self._authenticate(identity)
            if identity == self._identity:
                self._session, self._renew_at = session, self._clock() + SESSION_SECONDS / 2
                self._suspected = False
                if self._watch is None or self._watch.done():
                    self._watch = asyncio.ensure_future(self._forget_with_the_connection())
                return session

    def _attempted(self, attempt: asyncio.Future[bytes]) -> None:
        self._attempt = None
        if not attempt.cancelled():
            attempt.exception()  # the calls that waited for it may be gone

    async def _authenticate(self, identity: bytes) -> bytes:
        assert self._channel is not None
        nonce = client_nonce()
        call: aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(AUTHENTICATE_PATH)
        metadata = ((CHALLENGE_HEADER, identity + nonce),)
        try:
            reply = await call(b"", metadata=metadata, timeout=AUTHENTICATE_SECONDS)
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
        key = self._keys.key_of_worker(identity, nonce, worker, proof)
        if key is None:
            raise self._impostor("its proof is wrong")
        return b"".join((identity, nonce, worker, key.client_proof(identity, nonce, worker)))

    def _impostor(self, why: str) -> aio.AioRpcError:
        words = f"the process at {self._address} does not prove to be the worker that is registered there"
        if not self._suspected:
            logger.warning("%s (%s): it is sent nothing", words, why)
        self._suspected = True
        return _unavailable(words)

    def check_connection(self) -> None:
        """Forgets the worker's proof when the connection over which it came is gone."""
        if self._channel is None or self._channel.get_state() is not grpc.ChannelConnectivity.READY:
            self._session = b""

    async def _forget_with_the_connection(self) -> None:
        """Forgets the worker's proof when the connection breaks, even if a new one is there at once.

        A look at the state before a call sees the new one only: at its end may be another process.
        """
        assert self._channel is not None
        # Closing the channel ends the wait, or refuses it.
        with contextlib.suppress(aio.UsageError, RuntimeError):
            await self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        self._session = b""

    def refused(self, proof: bytes) -> None:
        """The worker does not accept this proof any more."""
        if self._session == proof:
            self._session = b""

    def follow(self, call: aio.Call, proof: bytes) -> None:
        """Checks the connection and the status code when a stream has ended."""

        def ended(call: aio.Call) -> None:
            self.check_connection()
            task = asyncio.ensure_future(self._check_code(call, proof))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

        call.add_done_callback(ended)

    async def _check_code(self, call: aio.Call, proof: bytes) -> None:
        if await call.code() is grpc.StatusCode.UNAUTHENTICATED:
            self.refused(proof)


def _unavailable(words: str) -> aio.AioRpcError:
    return aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), words)


async def _with_proof(
    session: WorkerSession, details: aio.ClientCallDetails
) -> tuple[aio.ClientCallDetails, bytes]:
    """The call with the proof that it carries, which is empty where it needs none."""
    method = details.method.decode() if isinstance(details.method, bytes) else details.method
    if method.startswith(OPEN_PATHS):
        session.check_connection()  # this call may be the one that connects again
        return details, b""
    proof = await session.proof()
    metadata = aio.Metadata(*(details.metadata or ()), (SESSION_HEADER, proof))
    made = aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )
    return made, proof


def _interceptors(session: WorkerSession) -> list[aio.ClientInterceptor]:
    class UnaryUnary(aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(
            self,
            continuation: Callable[[aio.ClientCallDetails, Q], Awaitable[aio.UnaryUnaryCall[Q, R]]],
            details: aio.ClientCallDetails,
            request: Q,
        ) -> aio.UnaryUnaryCall[Q, R]:
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

    class UnaryStream(aio.UnaryStreamClientInterceptor):
        async def intercept_unary_stream(
            self,
            continuation: Callable[[aio.ClientCallDetails, Q], Awaitable[aio.UnaryStreamCall[Q, R]]],
            details: aio.ClientCallDetails,
            request: Q,
        ) -> aio.UnaryStreamCall[Q, R]:
            made, proof = await _with_proof(session, details)
            call = await continuation(made, request)
            session.follow(call, proof)
            return call

    class StreamStream(aio.StreamStreamClientInterceptor):
        async def intercept_stream_stream(
            self,
            continuation: Callable[
                [aio.ClientCallDetails, Requests[Q]], Awaitable[aio.StreamStreamCall[Q, R]]
            ],
            details: aio.ClientCallDetails,
            requests: Requests[Q],
        ) -> aio.StreamStreamCall[Q, R]:
            made, proof = await _with_proof(session, details)
            call = await continuation(made, requests)
            session.follow(call, proof)
            return call

    return [UnaryUnary(), UnaryStream(), StreamStream()]
