"""CountedTransport: what a client has been sent, and what it has taken."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from collections.abc import Callable
from typing import Any

#: What a reply's head begins with, and hardly anything else.
_HEAD = b"HTTP/1.1 "


class CountedTransport:
    """A transport that counts what is written to it; everything else is the transport's own.

    A reply's head waits for the first piece of its body, and for the loop's next turn at most: a system call
    and a wake-up of the client's process cost as much as a tenth of a small request.

    `lingers` is asked at the connection's close: whether it still reads. Then it only writes no more, until
    `end`.
    """

    __slots__ = ("_head", "_lingers", "_lingering", "_transport", "_written")

    def __init__(self, transport: asyncio.Transport, lingers: Callable[[], bool] = lambda: False) -> None:
        self._transport = transport
        self._lingers = lingers
        self._lingering = False
        self._written = 0
        #: Written, and not passed on yet.
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Nothing to a client that has gone: uvloop's transports raise where asyncio's say nothing."""
        if self.is_closing():
            return
        self._written += len(data)
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(_HEAD):
            self._head = data
            asyncio.get_running_loop().call_soon(self._flush)
            return
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._lingering or self._transport.is_closing()

    def close(self) -> None:
        """After what has been written. Closed twice, it does not linger."""
        if self.is_closing() or not self._lingers():
            self.end()
            return
        self._flush()
        self._lingering = True
        if self._transport.can_write_eof():  # not over TLS
            self._transport.write_eof()

    def end(self) -> None:
        """After what has been written, whatever the client still sends."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    @property
    def unsent(self) -> int:
        return len(self._head) + self._transport.get_write_buffer_size()

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
