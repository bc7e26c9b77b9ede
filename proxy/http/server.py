"""The proxy's HTTP server: uvicorn on a socket that is bound already."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from triptych.base.config import ProxyConfig
from triptych.base.rpc.tls.certificates import Certificates
from triptych.proxy.http.closing import ClosingMiddleware
from triptych.proxy.http.connections import ConnectionLimits, Sweeper, connection_class
from triptych.proxy.http.peers import TrustedProxies
from triptych.proxy.http.places import ConnectionPlaces
from triptych.proxy.http.tls import TlsListener
from triptych.proxy.quotas.table import QuotaTable, quota_specs

#: Longer than clients keep unused connections: a request must not meet a connection that is being closed.
KEEP_ALIVE_SECONDS = 20
#: Seconds in which a connection that was accepted before the end may still send its request and be refused.
LINGER_SECONDS = 0.5
_POLL_SECONDS = 0.05


class HttpServer(uvicorn.Server):
    """uvicorn on a socket of ours; the signals are the service's."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        limits: ConnectionLimits | None = None,
        certificates: Certificates | None = None,
        quotas: QuotaTable | None = None,
        trusted: TrustedProxies | None = None,
    ) -> None:
        limits = limits or ConnectionLimits()
        quotas, trusted = quotas or QuotaTable(quota_specs(ProxyConfig())), trusted or TrustedProxies()
        places = ConnectionPlaces(quotas["connections"], limits.spare, trusted)
        self._closing = ClosingMiddleware(app)
        config = uvicorn.Config(
            self._closing,
            http=connection_class(limits, places),
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            lifespan="off",
            access_log=False,
            proxy_headers=False,  # quotas look at them themselves
            log_config=None,
            log_level="warning",
            ws="none",
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self._listener = listener
        self._door = None
        if certificates is not None:
            handshakes = quotas["handshakes"]
            self._door = TlsListener(
                listener, certificates, self._connection, handshakes, trusted, limits.head_seconds
            )
        self._sweeper = Sweeper(self.server_state, limits)
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> asyncio.Task[None]:
        """The running server's task; returns once it accepts connections."""
        task = asyncio.create_task(self.serve(sockets=[self._listener]), name="http")
        self._sweeping = asyncio.create_task(self._sweeper.run(), name="sweeper")
        while not self.started and not task.done():
            await asyncio.sleep(0.01)
        return task

    async def linger(self, seconds: float) -> None:
        """Every answer is its connection's last one; returns when there is no connection, at most so late.

        Clients, gateways above all, keep connections: also those to a proxy that no load balancer names any
        more. A request on its way must not meet the end of one.
        """
        self._closing.closing = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self.server_state.connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self, task: asyncio.Task[None]) -> None:
        """Stops listening, answers what is still sent for LINGER_SECONDS, and ends.

        Without that a request on its way would meet a reset, and no load balancer dares to repeat it.
        """
        for server in getattr(self, "servers", ()):
            server.close()
        await asyncio.sleep(LINGER_SECONDS)
        self.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._door is None:
            await super().startup(sockets)
            return
        self._door.start(self.config.backlog)
        self.servers = [self._door]  # type: ignore[list-item]  # it is closed and waited for as those are
        self.started = True

    def _connection(self, address: str) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state={}, address=address
        )
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
