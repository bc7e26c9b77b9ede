"""The proxy's HTTP server: uvicorn on a socket that is bound already."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Iterator

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.base.config import ProxyConfig
from triptych.base.rpc.ports import refused_port
from triptych.base.rpc.tls.certificates import Certificates
from triptych.proxy.http.connections import ConnectionLimits, Sweeper, connection_class
from triptych.proxy.http.listener import ClientListener, Handshakes
from triptych.proxy.http.peers import TrustedProxies
from triptych.proxy.http.places import ConnectionPlaces, Place
from triptych.proxy.quotas.table import QuotaTable, quota_specs
from triptych.proxy.turns.loop_turns import LoopTurns


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address. ConfigError when it is taken; port 0 picks a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: a reply does not wait until the client's system has acknowledged the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise refused_port(host, port, "--port", error.strerror or str(error)) from None
    listener.setblocking(False)
    return listener


class ClosingMiddleware:
    """Adds `Connection: close` to every answer once `closing` is set."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def last(message: Message) -> Awaitable[None]:
            if self.closing and message["type"] == "http.response.start":
                headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            return send(message)  # no coroutine of its own: it is called for every token

        await self._app(scope, receive, last)


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
        turns = LoopTurns()
        self._closing = ClosingMiddleware(app)
        config = uvicorn.Config(
            self._closing,
            http=connection_class(limits, places, turns),
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
        handshakes = None
        if certificates is not None:
            handshakes = Handshakes(certificates, quotas["handshakes"], limits.head_seconds)
        self._door = ClientListener(listener, self._connection, places, turns, handshakes)
        self._sweeper = Sweeper(self.server_state, limits)
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self) -> asyncio.Task[None]:
        """The running server's task; returns once it accepts connections."""
        task = asyncio.create_task(self.serve(sockets=[]), name="http")
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

    async def stop(self, task: asyncio.Task[None], linger: float = LINGER_SECONDS) -> None:
        """Stops listening, answers what is still sent for `linger` seconds, and ends.

        Without that a request on its way would meet a reset, and no load balancer dares to repeat it.
        """
        for server in getattr(self, "servers", ()):
            server.close()
        await asyncio.sleep(linger)
        self.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._door.start(self.config.backlog)
        self.servers = [self._door]  # type: ignore[list-item]  # it is closed and waited for as those are
        self.started = True

    def _connection(self, address: str | None, place: Place | None) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state={}, address=address, place=place
        )
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
