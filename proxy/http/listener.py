"""ClientListener: accepts the clients' connections, plain or over TLS, and opens them in turns by address."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial

from triptych.base.rpc.tls.certificates import Certificates
from triptych.proxy.http.json_body import closing_reply
from triptych.proxy.http.peers import MAX_HEADER, BadHeader, parse_header
from triptych.proxy.http.places import BUSY, ConnectionPlaces, Place
from triptych.proxy.quotas.quota import Hold, Quota, QuotaExceeded
from triptych.proxy.turns.loop_turns import LoopTurns

logger = logging.getLogger(__name__)

#: Connections that are accepted in one turn of the event loop: about a millisecond.
BURST = 128
#: Seconds that a client gets for its part of the connection's end.
_SHUTDOWN_SECONDS = 5.0
#: Between two tries to accept where the process has no file left.
_NO_FILES_SECONDS = 0.2
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class Handshakes:
    """What TLS handshakes need. They have a quota of their own, per peer.

    asyncio's own TLS server would count a connection only after the handshake, and keep one certificate for
    ever.
    """

    certificates: Certificates
    quota: Quota
    seconds: float


class ClientListener:
    """Accepts whatever has come, at once: behind a thousand connections in the kernel's queue, which knows
    only arrival, one of another address would wait for all of them.

    `make` makes the protocol of a connection for the client's address, None where it is the socket's, and
    for its place, None where it is not taken yet.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[str | None, Place | None], asyncio.Protocol],
        places: ConnectionPlaces,
        turns: LoopTurns,
        handshakes: Handshakes | None = None,
    ) -> None:
        self._listener = listener
        self._make = make
        self._places = places
        self._trusted = places.trusted
        self._turns = turns
        self._handshakes = handshakes
        #: Connections that are being opened.
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None

    @property
    def opening(self) -> int:
        """How many connections are being opened, their handshakes included."""
        return len(self._opening)

    def start(self, backlog: int) -> None:
        self._listener.listen(backlog)
        self._watch()

    def close(self) -> None:
        """Accepts no more; what is being opened goes on."""
        if self._listener.fileno() < 0:
            return
        if self._retry is not None:
            self._retry.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    async def wait_closed(self) -> None:
        """Ends what is still being opened, too."""
        tasks = list(self._opening)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _watch(self) -> None:
        self._retry = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(BURST):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_FILES:
                    continue  # one that its client has given up
                logger.warning("no connection can be accepted: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener)
                self._retry = loop.call_later(_NO_FILES_SECONDS, self._watch)
                return
            connection.setblocking(False)
            if self._handshakes is None:
                self._take(connection, address[0])
            else:
                self._shake_hands(connection, address[0], self._handshakes)

    def _take(self, connection: socket.socket, peer: str) -> None:
        """A place is taken at once, so that no more wait for their turn than there are places."""
        place = None
        if not self._places.has_header(peer) and (place := self._places.take(peer)) is None:
            with connection, contextlib.suppress(OSError):
                connection.send(closing_reply(BUSY))
            return
        opened = partial(self._open, connection, place)
        self._turns.ask(self._trusted.holder(peer), partial(self._begin, opened))

    def _begin(self, opened: Callable[[], Coroutine[None, None, None]]) -> None:
        task = asyncio.get_running_loop().create_task(opened(), name="connection")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, place: Place | None) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(None, place), connection
            )
        except BaseException as error:
            connection.close()
            if place is not None:
                place.close()
            if not isinstance(error, OSError):
                raise

    def _shake_hands(self, connection: socket.socket, peer: str, handshakes: Handshakes) -> None:
        try:
            hold = handshakes.quota.hold(self._trusted.holder(peer), 1)
        except QuotaExceeded:
            connection.close()
            return
        opened = partial(self._open_tls, connection, peer, hold, handshakes)
        self._turns.ask(self._trusted.holder(peer), partial(self._begin, opened))

    async def _open_tls(
        self, connection: socket.socket, peer: str, hold: Hold, handshakes: Handshakes
    ) -> None:
        # ssl's errors, and a handshake that takes too long, are OSErrors
        with hold, contextlib.suppress(OSError, BadHeader, QuotaExceeded), contextlib.ExitStack() as stack:
            if self._trusted.proxy_protocol and self._trusted.trusts(peer):
                opening = stack.enter_context(contextlib.ExitStack())
                opening.callback(connection.close)
                async with asyncio.timeout(handshakes.seconds):
                    peer = await _told_address(connection)
                hold.close()
                stack.enter_context(handshakes.quota.hold(self._trusted.holder(peer), 1))
                opening.pop_all()
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(peer, None),
                connection,
                ssl=handshakes.certificates.current().context,
                ssl_handshake_timeout=handshakes.seconds,
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
