"""Bulk writes: SET straight from the caller's buffers, which asyncio's transports would copy."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.store.address import StoreAddress, command
from triptych.store.bulk import BulkLost, BulkRefused, refusal
from triptych.store.codec import Buffer
from triptych.store.sockets import Wire, open_wire


class BulkWriter:
    """A connection to the store that writes values: one SET at a time. Any failure closes it."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._busy = False

    @classmethod
    async def open(cls, address: StoreAddress) -> BulkWriter:
        """An authenticated connection. OSError or BulkError if that fails."""
        writer = cls(await open_wire(address))
        try:
            for words in address.greeting():
                await writer._exchange([memoryview(command(*words))])
        except BulkRefused as error:
            said = address.without_password(error)
            raise BulkLost(f"the store refused the login: {said}", untouched=False) from None
        return writer

    @property
    def usable(self) -> bool:
        """Whether the connection is idle and open, with no unexpected bytes received."""
        return not self._busy and self._wire.usable

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

    async def asking(self) -> None:
        """Sends ASKING: the next command may be about a slot that is being moved to this server."""
        await self._exchange([memoryview(command("ASKING"))])

    async def _exchange(self, buffers: list[memoryview]) -> bytes:
        self._busy = True
        try:
            await self._wire.send([buffer for buffer in buffers if len(buffer)])
            reply = await self._read_line()
            if reply.startswith(b"-"):
                raise refusal(reply[1:])
        except OSError as error:
            self.close()
            raise BulkLost(f"the connection broke: {error}", untouched=True) from error
        except BaseException:
            self.close()
            raise
        self._busy = False
        return reply

    async def _read_line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            data = await self._wire.receive(512)
            if not data:
                raise ConnectionResetError("end of stream")
            line += data
            if len(line) > 4096:
                raise BulkRefused("the reply's line is too long")
        return line[:-2]

    def close(self) -> None:
        self._wire.close()
