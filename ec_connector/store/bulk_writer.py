"""Bulk writes: SET straight from the caller's buffers, which asyncio's transports would copy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from triptych.ec_connector.store.address import StoreAddress, command, open_socket
from triptych.ec_connector.store.bulk import BulkLost, BulkRefused
from triptych.ec_connector.store.codec import Buffer

#: Buffers passed to one sendmsg; the kernel takes a few hundred KiB at a time.
_BUFFERS_AT_ONCE = 8


class BulkWriter:
    """A connection to the store that writes values: one SET at a time. Any failure closes it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._busy = False

    @classmethod
    async def open(cls, address: StoreAddress) -> BulkWriter:
        """An authenticated connection. OSError or BulkError if that fails."""
        writer = cls(await open_socket(address))
        try:
            for words in address.greeting():
                await writer._exchange([memoryview(command(*words))])
        except BulkRefused:
            raise BulkLost("the store refused the credentials", untouched=False) from None
        return writer

    @property
    def usable(self) -> bool:
        """Whether the connection is idle and open, with no unexpected bytes received."""
        if self._busy or self._sock.fileno() < 0:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def set(
        self, key: str, value: Sequence[Buffer], *, milliseconds: int, only_new: bool = True
    ) -> bool:
        """Stores the joined buffers with a TTL; False when `only_new` and the key is there already."""
        raw, nbytes = key.encode(), sum(len(piece) for piece in value)
        options = ["NX"] if only_new else []
        tail = command(*options, "PX", str(milliseconds)).split(b"\r\n", 1)[1]
        frame = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (5 + len(options), len(raw), raw, nbytes)
        reply = await self._exchange([memoryview(piece) for piece in (frame, *value, b"\r\n" + tail)])
        if reply == b"+OK":
            return True
        if reply == b"$-1":
            return False
        self.close()
        raise BulkRefused(f"the store answered {reply[:80].decode(errors='replace')}")

    async def _exchange(self, buffers: list[memoryview]) -> bytes:
        self._busy = True
        try:
            await self._send([buffer for buffer in buffers if len(buffer)])
            reply = await self._read_line()
            if reply.startswith(b"-"):
                raise BulkRefused(f"the store answered {reply[1:81].decode(errors='replace')}")
        except OSError as error:
            self.close()
            raise BulkLost(f"the connection broke: {error}", untouched=True) from error
        except BaseException:
            self.close()
            raise
        self._busy = False
        return reply

    async def _send(self, pending: list[memoryview]) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def send_some() -> None:
            if done.done():
                return
            try:
                sent = self._sock.sendmsg(pending[:_BUFFERS_AT_ONCE])
            except BlockingIOError:
                return
            except OSError as error:
                done.set_exception(error)
                return
            while pending and sent >= len(pending[0]):
                sent -= len(pending.pop(0))
            if pending:
                pending[0] = pending[0][sent:]
            else:
                done.set_result(None)

        loop.add_writer(self._sock.fileno(), send_some)
        try:
            await done
        finally:
            loop.remove_writer(self._sock.fileno())

    async def _read_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            data = await asyncio.get_running_loop().sock_recv(self._sock, 512)
            if not data:
                raise ConnectionResetError("end of stream")
            line += data
            if len(line) > 4096:
                raise BulkRefused("the reply's line is too long")
        return line[:-2]

    def close(self) -> None:
        self._sock.close()
