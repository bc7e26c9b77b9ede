"""The TLS port of HTTP: connections are counted and limited from their first byte on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable

from triptych.rpc.tls.certificates import Certificates

logger = logging.getLogger(__name__)

#: Seconds that a client gets for its part of the connection's end.
_SHUTDOWN_SECONDS = 5.0
#: Between two tries to accept where the process has no file left.
_NO_FILES_SECONDS = 0.2
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class TlsListener:
    """Accepts TLS connections; `make` makes the protocol of each.

    `full` says, with the number of handshakes under way, whether another connection is too many. asyncio's
    own TLS server would count a connection only after the handshake, and keep one certificate for ever.
    """

    def __init__(
        self,
        listener: socket.socket,
        certificates: Certificates,
        make: Callable[[], asyncio.Protocol],
        full: Callable[[int], bool],
        handshake_seconds: float,
    ) -> None:
        self._listener = listener
        self._certificates = certificates
        self._make = make
        self._full = full
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
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    if error.errno in _NO_FILES:
                        logger.warning("no connection can be accepted: %s", error.strerror)
                        await asyncio.sleep(_NO_FILES_SECONDS)
                    continue  # else one that its client has given up
                if self._full(len(self._handshakes)):
                    connection.close()
                else:
                    task = asyncio.create_task(self._shake_hands(connection), name="tls handshake")
                    self._handshakes.add(task)
                    task.add_done_callback(self._handshakes.discard)
                await asyncio.sleep(0)  # sock_accept does not wait while there are connections

    async def _shake_hands(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # ssl's errors, and a handshake that takes too long, are OSErrors
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                connection,
                ssl=self._certificates.current().context,
                ssl_handshake_timeout=self._handshake_seconds,
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
            )
