"""CountedTransport: what a client has been sent, and what it has taken."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from typing import Any


class CountedTransport:
    """A transport that counts what is written to it; everything else is the transport's own."""

    __slots__ = ("_transport", "_written")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Nothing to a client that has gone: uvloop's transports raise where asyncio's say nothing."""
        if self._transport.is_closing():
            return
        self._written += len(data)
        self._transport.write(data)

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    @property
    def taken(self) -> int:
        """Bytes that the client's system has acknowledged.

        The kernel may hold megabytes and takes more only once a third of them has gone: without its count a
        slow reader would look like one that reads nothing.
        """
        queued = bytearray(4)
        # A ValueError: the descriptor of a socket that has just been closed.
        with contextlib.suppress(OSError, AttributeError, ValueError):
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self._written - self.unsent - int.from_bytes(queued, sys.byteorder)

    @property
    def behind(self) -> int:
        """Bytes that were written and that the client's system has not acknowledged."""
        return self._written - self.taken
