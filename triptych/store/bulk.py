"""Bulk transfers: errors, results, buffers and writes, separate from redis-py's."""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from triptych.store.address import StoreAddress
from triptych.store.codec import Buffer
from triptych.store.sockets import Wire, command, open_wire


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
            for args in address.greeting():
                await writer._exchange([memoryview(command(*args))])
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


class ScatterBuffer:
    """A writable buffer over all `pieces`, in their order, filled from front to back.

    The head of a stored value is not part of the tensor, and memory of a pool may be in several pieces.
    """

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self.pieces = [piece for piece in pieces if len(piece)]
        self._starts = [0, *accumulate(len(piece) for piece in self.pieces)]

    def __len__(self) -> int:
        return self._starts[-1]

    def rest(self, start: int) -> memoryview:
        """From byte `start`, which is inside, to the end of its piece."""
        index = bisect_right(self._starts, start) - 1
        return self.pieces[index][start - self._starts[index] :]

    def between(self, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes [start, stop), in pieces."""
        while start < min(stop, len(self)):
            piece = self.rest(start)[: stop - start]
            yield piece
            start += len(piece)

    def write(self, start: int, data: bytes) -> None:
        """Copies `data` to byte `start` and on; it must fit."""
        for piece in self.between(start, start + len(data)):
            piece[:] = data[: len(piece)]
            data = data[len(piece) :]

    def read(self, start: int, stop: int) -> bytes:
        """A copy of bytes [start, stop)."""
        return b"".join(self.between(start, stop))


#: Memory that a value is received into.
Received = memoryview | ScatterBuffer


def scattered(memory: Received) -> ScatterBuffer:
    """The memory as pieces, whichever it is."""
    return memory if isinstance(memory, ScatterBuffer) else ScatterBuffer([memory])


_NOT_SERVING = ("CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "TRYAGAIN")
#: Characters of an error reply that are repeated.
_SHOWN = 80
#: Bytes per second below which a transfer counts as stalled.
SLOWEST = 20e6


class BulkError(Exception):
    """The transfer failed and its connection is closed."""


class BulkLost(BulkError):
    """The connection broke. `untouched`: before the first byte of the reply."""

    def __init__(self, message: str, *, untouched: bool) -> None:
        super().__init__(message)
        self.untouched = untouched


class BulkRefused(BulkError):
    """The server answered with an error or a redirect."""


class BulkRedirected(BulkRefused):
    """Another server of the cluster has the key's slot: MOVED, or ASK, which is for this command alone."""

    def __init__(self, slot: int, host: str, port: int, *, ask: bool) -> None:
        super().__init__(f"the slot {slot} is at {host}:{port}")
        self.slot, self.host, self.port, self.ask = slot, host, port, ask


class BulkNotServing(BulkRefused):
    """The server cannot answer for now: it is loading, or has lost its role or slots. A retry may succeed."""


def refusal(line: bytes) -> BulkRefused:
    """The error for the line of an error reply, without its first character."""
    text = line.decode(errors="replace")
    kind, _, rest = text.partition(" ")
    slot, _, place = rest.partition(" ")
    host, _, port = place.rpartition(":")
    if kind in ("MOVED", "ASK") and slot.isdecimal() and port.isdecimal():
        return BulkRedirected(int(slot), host, int(port), ask=kind == "ASK")
    if kind in _NOT_SERVING:
        return BulkNotServing(f"the store answered {text[:_SHOWN]}")
    return BulkRefused(f"the store answered {text[:_SHOWN]}")


class ValueTooLarge(BulkError):
    """The value is larger than expected."""


class SaveResult(enum.Enum):
    """The result of a save; in all three cases the embedding is in the store."""

    STORED = enum.auto()
    ALREADY = enum.auto()
    REPLACED = enum.auto()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified value. `body` is the caller's memory, filled with the tensor's bytes.

    `producer` is the trace context of the span that computed it; empty where there is none.
    """

    body: Received
    producer: bytes = b""


@dataclass(frozen=True, slots=True)
class Missing:
    """No usable value. `damaged_digest` identifies a damaged one, so that a save may replace it."""

    reason: str
    damaged_digest: str = ""


LoadResult = Loaded | Missing


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The byte budget and eviction policy of a server or a store; `max_bytes` 0: no limit is set."""

    max_bytes: int
    used_bytes: int
    policy: str
    #: Keys evicted since the servers started.
    evicted_keys: int = 0


#: The eviction policy that keeps leases and registrations, which have no TTL.
POLICY = "volatile-lru"


def combined(parts: Sequence[tuple[StoreMemory, float]]) -> StoreMemory:
    """The memory of servers that each hold this part of all keys.

    The budget is what fits before the first server is full: the sum, where each one's is by its part.
    """
    memories = [memory for memory, _ in parts]
    limited = bool(memories) and all(memory.max_bytes for memory in memories)
    return StoreMemory(
        max_bytes=int(min(memory.max_bytes / part for memory, part in parts)) if limited else 0,
        used_bytes=sum(memory.used_bytes for memory in memories),
        evicted_keys=sum(memory.evicted_keys for memory in memories),
        policy=next((memory.policy for memory in memories if memory.policy != POLICY), POLICY),
    )
