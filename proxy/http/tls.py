"""The TLS port of HTTP: connections are counted and limited from their first byte on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable

from triptych.base.rpc.tls.certificates import Certificates
from triptych.proxy.http.peers import TrustedProxies
from triptych.proxy.http.proxy_protocol import MAX_HEADER, BadHeader, parse_header
from triptych.proxy.quotas.quota import Hold, Quota, QuotaExceeded

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
