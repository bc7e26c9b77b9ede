"""The proxy's HTTP server: uvicorn on a socket that is bound already."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.base.config import ProxyConfig
from triptych.base.errors import ConfigError
from triptych.base.rpc.tls.certificates import Certificates
from triptych.proxy.http.connections import ConnectionLimits, ConnectionPlaces, Sweeper, connection_class
from triptych.proxy.http.peers import MAX_HEADER, BadHeader, TrustedProxies, parse_header
from triptych.proxy.quotas.quota import Hold, Quota, QuotaExceeded
from triptych.proxy.quotas.table import QuotaTable, quota_specs


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
        raise ConfigError(port_error("--port", host, port, error)) from None
    listener.setblocking(False)
    return listener


def port_error(flag: str, host: str, port: int, error: OSError | RuntimeError) -> str:
    """The message for a port that cannot be bound; `flag` is the one that sets it."""
    if isinstance(error, OSError) and error.errno not in (98, 48, 10048):
        return f"cannot listen on {host}:{port}: {error.strerror}"
    return f"port {port} is taken: {flag} N picks another"


logger = logging.getLogger(__name__)

#: Seconds that a client gets for its part of the connection's end.
_SHUTDOWN_SECONDS = 5.0
#: Between two tries to accept where the process has no file left.
_NO_FILES_SECONDS = 0.2
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class TlsListener:
    """Accepts TLS connections; `make` makes the protocol of each, for the client's address.

    Handshakes have a quota of their own, per peer. asyncio's own TLS server would count a connection only
    after the handshake, and keep one certificate for ever.
    """

    def __init__(
        self,
        listener: socket.socket,
        certificates: Certificates,
        make: Callable[[str], asyncio.Protocol],
        handshakes: Quota,
        trusted: TrustedProxies,
        handshake_seconds: float,
    ) -> None:
        self._listener = listener
        self._certificates = certificates
        self._make = make
        self._quota = handshakes
        self._trusted = trusted
        self._handshake_seconds = handshake_seconds
        self._handshakes: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def handshakes(self) -> int:
        """How many are under way."""
        return len(self._handshakes)

    def start(self, backlog: int) -> None:
        self._listener.listen(backlog)
        self._task = asyncio.create_task(self._accept(), name="tls")

    def close(self) -> None:
        """Accepts no more; handshakes under way go on."""
        if self._task is not None:
            self._task.cancel()

    async def wait_closed(self) -> None:
        """Ends the handshakes under way, too."""
        tasks = [*self._handshakes, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        with self._listener:
            while True:
                try:
                    connection, address = await loop.sock_accept(self._listener)
                except OSError as error:
                    if error.errno in _NO_FILES:
                        logger.warning("no connection can be accepted: %s", error.strerror)
                        await asyncio.sleep(_NO_FILES_SECONDS)
                    continue  # else one that its client has given up
                self._begin(connection, address[0])
                await asyncio.sleep(0)  # sock_accept does not wait while there are connections

    def _begin(self, connection: socket.socket, peer: str) -> None:
        try:
            hold = self._quota.hold(self._trusted.holder(peer), 1)
        except QuotaExceeded:
            connection.close()
            return
        task = asyncio.create_task(self._shake_hands(connection, peer, hold), name="tls handshake")
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket, peer: str, hold: Hold) -> None:
        connection.setblocking(False)
        # ssl's errors, and a handshake that takes too long, are OSErrors
        with hold, contextlib.suppress(OSError, BadHeader, QuotaExceeded), contextlib.ExitStack() as stack:
            if self._trusted.proxy_protocol and self._trusted.trusts(peer):
                opening = stack.enter_context(contextlib.ExitStack())
                opening.callback(connection.close)
                async with asyncio.timeout(self._handshake_seconds):
                    peer = await _told_address(connection)
                hold.close()
                stack.enter_context(self._quota.hold(self._trusted.holder(peer), 1))
                opening.pop_all()
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(peer),
                connection,
                ssl=self._certificates.current().context,
                ssl_handshake_timeout=self._handshake_seconds,
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
            )


async def _told_address(connection: socket.socket) -> str:
    """The client's address of a PROXY header, which is read to its last byte and no further."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < MAX_HEADER:
        # A byte more than is known to belong to the header may be of the handshake.
        more = await loop.sock_recv(connection, 1)
        data += more
        if not more:
            raise BadHeader("no PROXY header")
        if (parsed := parse_header(data)) is not None:
            return parsed[0]
    raise BadHeader("a PROXY header without its end")


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
