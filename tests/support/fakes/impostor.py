"""A process that says it is a worker, answers every call, and notes all that it is sent."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from triptych.base.rpc.channels import listen
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.types import WorkerInfo

HEALTH = "/grpc.health.v1.Health/Check"


class Impostor(grpc.GenericRpcHandler):
    """Runs for the length of an `async with`, at `port` or a free one, with TLS where it has certificates.

    It says SERVING to health checks of the services that it `knows`; None: of all.
    """

    def __init__(
        self, port: int = 0, certificates: Certificates | None = None, knows: frozenset[str] | None = None
    ) -> None:
        self._knows = knows
        self._server = aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        self.port = listen(self._server, f"127.0.0.1:{port}", certificates, mutual=False)
        #: Methods that were called, in order.
        self.methods: list[str] = []
        #: Values of all metadata and all messages.
        self.words: list[bytes] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Impostor:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        self.methods.append(method)
        for name, value in handler_call_details.invocation_metadata or ():
            self.words += [name.encode(), value if isinstance(value, bytes) else value.encode()]

        async def call(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for message in requests:
                self.words.append(message)
                if method == HEALTH:
                    service = health_pb2.HealthCheckRequest.FromString(message).service
                    if self._knows is not None and service not in self._knows:
                        await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
                    status = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
                    yield status.SerializeToString()
                    return
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
