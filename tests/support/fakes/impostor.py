"""A process that says it is a worker, answers every call, and notes all that it is sent."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from triptych.base.rpc.channels import make_channel
from triptych.base.rpc.proofs import SIZE, identity_of
from triptych.base.rpc.server_auth import CHALLENGE_HEADER, METHOD, SERVICE
from triptych.base.types import WorkerInfo

AUTHENTICATE = f"/{SERVICE}/{METHOD}"
HEALTH = "/grpc.health.v1.Health/Check"

#: What it answers to a challenge.
Answer = Callable[[bytes], Awaitable[bytes]]


async def at_random(challenge: bytes) -> bytes:
    """A nonce and a proof of zeros."""
    return bytes(2 * SIZE)


async def by_echo(challenge: bytes) -> bytes:
    """What it was sent."""
    return challenge


def passed_on(target: WorkerInfo, *, as_meant_for_it: bool) -> Answer:
    """The answer of a real worker, which is asked with the same nonce."""

    async def answer(challenge: bytes) -> bytes:
        if as_meant_for_it:
            challenge = identity_of(target) + challenge[SIZE:]
        async with make_channel(target.address) as channel:
            call: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(AUTHENTICATE)
            return bytes(await call(b"", metadata=((CHALLENGE_HEADER, challenge),), timeout=10))

    return answer


class Impostor(grpc.GenericRpcHandler):
    """Runs for the length of an `async with`, at `port` or a free one."""

    def __init__(self, port: int = 0, answer: Answer = at_random) -> None:
        self._answer = answer
        self._server = aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        #: Methods that were called, in order.
        self.methods: list[str] = []
        #: Values of all metadata and all messages.
        self.words: list[bytes] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def secrets_asked_for(self) -> list[str]:
        """The calls that are neither health checks nor challenges."""
        return [method for method in self.methods if method not in (AUTHENTICATE, HEALTH)]

    async def __aenter__(self) -> Impostor:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        metadata = list(handler_call_details.invocation_metadata or ())
        self.methods.append(method)
        for name, value in metadata:
            self.words += [name.encode(), value if isinstance(value, bytes) else value.encode()]

        async def call(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            if method == AUTHENTICATE:
                try:
                    challenge = dict(metadata).get(CHALLENGE_HEADER, b"")
                    yield await self._answer(challenge if isinstance(challenge, bytes) else b"")
                except aio.AioRpcError as error:
                    await context.abort(error.code(), error.details())
                return
            if method == HEALTH:
                status = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
                yield status.SerializeToString()
                return
            async for message in requests:
                self.words.append(message)
            yield b""

        return grpc.stream_stream_rpc_method_handler(call)


def registration(like: WorkerInfo, address: str, *, proof: str = "") -> WorkerInfo:
    """What the impostor writes into the registry: a worker like this one, at its own address."""
    return replace(like, address=address, incarnation="impostor", proof=proof)


def port_of(info: WorkerInfo) -> int:
    return int(info.address.rpartition(":")[2])


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
