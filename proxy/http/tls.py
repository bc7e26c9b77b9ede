"""TLS connections of the HTTP port: counted and limited from their first byte on, the handshake included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from triptych.rpc.tls.certificates import Certificates

#: Seconds that a client gets for its part of the connection's end.
_SHUTDOWN_SECONDS = 5.0


class TlsDoor:
    """Makes the protocols of a TLS port: `make` that of a connection whose handshake is done.

    `full` says, with the number of handshakes under way, whether another connection is too many. asyncio's
    own TLS server would count a connection only after the handshake, and keep one certificate for ever.
    """

    def __init__(
        self,
        certificates: Certificates,
        make: Callable[[], asyncio.Protocol],
        full: Callable[[int], bool],
        handshake_seconds: float,
    ) -> None:
        self._certificates = certificates
        self._make = make
        self._full = full
        self._handshake_seconds = handshake_seconds
        self._handshakes: set[asyncio.Task[None]] = set()

    def __call__(self) -> asyncio.Protocol:
        return _Accepted(self)

    async def close(self) -> None:
        """Ends the handshakes under way."""
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def accepted(self, transport: asyncio.Transport) -> None:
        """Begins the handshake of a new connection, which is cut off where there are too many."""
        if self._full(len(self._handshakes)):
            transport.abort()
            return
        transport.pause_reading()  # until there is somebody to read: start_tls goes on
        task = asyncio.create_task(self._shake(transport), name="tls handshake")
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake(self, transport: asyncio.Transport) -> None:
        early = _Early()
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                early,
                self._certificates.current().context,
                server_side=True,
                ssl_handshake_timeout=self._handshake_seconds,
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
            )
            if secured is not None:
                early.hand_over(secured, self._make())
        except OSError:  # those of ssl, and a handshake that takes too long, are among them
            transport.abort()
        except BaseException:
            transport.abort()
            raise


class _Accepted(asyncio.Protocol):
    """A connection before its handshake."""

    def __init__(self, door: TlsDoor) -> None:
        self._door = door

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._door.accepted(transport)


class _Early(asyncio.Protocol):
    """Keeps what comes in the moment between the handshake's end and the protocol that reads it."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._ended = False
        self._lost = False

    def data_received(self, data: bytes) -> None:
        self._data.append(bytes(data))

    def eof_received(self) -> None:
        self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True

    def hand_over(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        """From now on the connection is this protocol's."""
        if self._lost:
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._data:
            protocol.data_received(b"".join(self._data))
        if self._ended:
            protocol.eof_received()
