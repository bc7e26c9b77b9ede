"""Bulk reads: GET straight into the caller's buffer, on connections of its own.

redis-py buffers and copies every value; here the socket writes into the tensor's own memory. A reader that
is out of step with the stream would give one caller another's bytes, so the connection is closed after any
timeout, cancellation, error or redirect reply, and after a value of unexpected size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import xxhash

from triptych.base.types import ItemPlan
from triptych.store.address import StoreAddress
from triptych.store.bulk import (
    BulkError,
    BulkLost,
    BulkRefused,
    Loaded,
    LoadResult,
    Missing,
    Received,
    ScatterBuffer,
    ValueTooLarge,
    refusal,
    scattered,
)
from triptych.store.codec import CHECKSUM_SPAN, HEAD_BYTES, Damage, Head, decode_head
from triptych.store.sockets import command, open_socket


class ArrivingValue:
    """A value being received into `memory`, which has its length, and its checksum so far.

    `undivided`: one that the store would split is head and body in one, too.
    """

    def __init__(self, memory: Received, *, mm_hash: str, namespace: str, undivided: bool = False) -> None:
        self._undivided = undivided
        self._buffer = scattered(memory)
        self._mm_hash = mm_hash
        self._namespace = namespace
        self._head: Head | Damage | None = None
        self._state = xxhash.xxh3_128()
        self._hashed = 0

    def feed(self, filled: int) -> None:
        """The first `filled` bytes have arrived."""
        if self._head is None and filled >= min(HEAD_BYTES, len(self._buffer)):
            self._head = self._read_head()
        if isinstance(self._head, Head) and filled > self._hashed:
            for piece in self._buffer.between(self._hashed, filled):
                self._state.update(piece)
            self._hashed = filled

    def _read_head(self) -> Head | Damage:
        head = decode_head(self._buffer.read(0, HEAD_BYTES), mm_hash=self._mm_hash, namespace=self._namespace)
        if isinstance(head, Head):
            if len(self._buffer) != head.body_offset + (0 if self._split(head) else head.plan.nbytes):
                return Damage("the body is cut off or too long")
            start, stop = CHECKSUM_SPAN
            self._state.update(self._buffer.read(0, start))
            self._hashed = stop
        return head

    def result(self) -> Head | Damage:
        """The head, if the whole value has arrived and its checksum is correct.

        The checksum of a split value covers its parts too, which come later.
        """
        self.feed(len(self._buffer))
        assert self._head is not None
        if isinstance(self._head, Damage) or self._split(self._head):
            return self._head
        if self._state.digest() == self._head.checksum:
            return self._head
        return Damage("the checksum is wrong")

    def _split(self, head: Head) -> bool:
        return head.parts > 0 and not self._undivided


class ArrivingItem:
    """The value of an item being received from an encoder worker, head and body in one, into `body`."""

    def __init__(self, plan: ItemPlan, body: Received) -> None:
        self._plan = plan
        self._body = body
        self._value: ArrivingValue | None = None

    def begin(self, nbytes: int) -> ScatterBuffer:
        """Memory for a value of `nbytes`. ValueTooLarge, before any is allocated, for another item's."""
        if not self._plan.nbytes < nbytes <= self._plan.nbytes + HEAD_BYTES:
            raise ValueTooLarge(f"the value has {nbytes} bytes, the plan says {self._plan.nbytes}")
        memory = behind_a_head(nbytes, [self._body])
        self._value = ArrivingValue(
            memory, mm_hash=self._plan.mm_hash, namespace=self._plan.namespace, undivided=True
        )
        return memory

    def feed(self, filled: int) -> None:
        """The first `filled` bytes have arrived."""
        assert self._value is not None
        self._value.feed(filled)

    def result(self) -> LoadResult:
        """The body, if all has arrived, of this plan and with its checksum."""
        assert self._value is not None
        head = self._value.result()
        if isinstance(head, Damage):
            return Missing(head.reason)
        if head.plan != self._plan:
            return Missing("served with another plan than asked for")
        return Loaded(self._body, head.producer)


def behind_a_head(nbytes: int, body: Sequence[Received]) -> ScatterBuffer:
    """Memory for a value of `nbytes`: its head, then the body. BulkRefused where there is no such head."""
    head = nbytes - sum(len(memory) for memory in body)
    if not 0 <= head <= HEAD_BYTES:
        raise BulkRefused(f"the value has {nbytes} bytes, no head and body of this item")
    pieces = [piece for memory in body for piece in scattered(memory).pieces]
    return ScatterBuffer([memoryview(bytearray(head)), *pieces])


_LINE_BYTES = 512

#: Returns memory for a value of this many bytes.
Into = Callable[[int], Received]
#: Called with the number of bytes that have arrived so far.
Progress = Callable[[int], None]


class BulkReader(asyncio.BufferedProtocol):
    """A connection to the store that reads values: one GET at a time."""

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(_LINE_BYTES))
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Received | bytes | None] | None = None
        self._into: Into | None = None
        self._progress: Progress = _unobserved
        self._reset()

    def _reset(self) -> None:
        self._line = b""
        self._memory: Received = memoryview(b"")
        self._body: ScatterBuffer | None = None
        self._filled = 0
        self._untouched = True

    @classmethod
    async def open(cls, address: StoreAddress) -> BulkReader:
        """An authenticated connection. OSError or BulkError if that fails."""
        loop = asyncio.get_running_loop()
        sock = await open_socket(address)
        tls: dict[str, Any] = {}
        try:
            if address.tls is not None:
                tls = {"ssl": address.tls.context(), "server_hostname": address.tls.name or address.host}
            _, reader = await loop.create_connection(cls, sock=sock, **tls)
        except BaseException:
            sock.close()
            raise
        try:
            for args in address.greeting():
                await reader._exchange(command(*args), None)
        except BulkRefused as error:
            said = address.without_password(error)
            raise BulkLost(f"the store refused the login: {said}", untouched=False) from None
        return reader

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self._reply is None

    async def get(self, key: str, into: Into, progress: Progress | None = None) -> Received | None:
        """The memory from `into(nbytes)`, filled with the value; None if there is no such key.

        `progress` is called with the number of bytes received so far; it must not raise.
        `into` may raise a BulkError to refuse the size. Any failure closes the connection.
        """
        self._progress = progress or _unobserved
        reply = await self._exchange(command("GET", key), into)
        if isinstance(reply, bytes):
            self.close()
            raise BulkRefused("GET was answered by a status")
        return reply

    async def asking(self) -> None:
        """Sends ASKING: the next command may be about a slot that is being moved to this server."""
        await self._exchange(command("ASKING"), None)

    async def _exchange(self, frame: bytes, into: Into | None) -> Received | bytes | None:
        if self._transport is None or not self.usable:
            raise BulkLost("the connection is closed", untouched=True)
        self._reset()
        self._into = into
        self._reply = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(frame)
            return await self._reply
        except BaseException:
            self.close()
            raise
        finally:
            self._reply = None
            self._memory = memoryview(b"")
            self._body = None
            self._into = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(BulkLost(f"the connection broke: {exc or 'end of stream'}", untouched=self._untouched))

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._body is not None and self._filled < len(self._body):
            return self._body.rest(self._filled)
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._untouched = False
        if self._reply is None or self._reply.done():
            self.close()
        elif self._body is not None and self._filled < len(self._body):
            self._filled += nbytes
            self._progress(self._filled)
        else:
            self._outside_body(bytes(self._scratch[:nbytes]))

    def _outside_body(self, data: bytes) -> None:
        """Bytes outside the body: the reply's first line, what follows it, and the closing line end."""
        if self._body is None:
            self._line += data
            line, end, data = self._line.partition(b"\r\n")
            if not end:
                if len(self._line) > _LINE_BYTES:
                    self._fail(BulkRefused("the reply's first line is too long"))
                return
            self._line = b""
            if not self._begin(line, data):
                return
        assert self._body is not None
        head = data[: len(self._body) - self._filled]
        self._body.write(self._filled, head)
        self._filled += len(head)
        if head:
            self._progress(self._filled)
        self._line += data[len(head) :]
        if len(self._line) >= 2:
            self._finish()

    def _begin(self, line: bytes, rest: bytes) -> bool:
        """Reads the first line; True when a body follows."""
        kind, text = line[:1], line[1:]
        if kind == b"$" and text.isdigit() and self._into is not None:
            try:
                self._memory = self._into(int(text))
            except BulkError as error:
                self._fail(error)
            else:
                self._body = scattered(self._memory)
                if len(self._body) == int(text):
                    return True
                self._fail(BulkRefused("the buffer is not of the value's size"))
        elif line == b"$-1" and not rest:
            self._succeed(None)
        elif kind == b"+" and not rest:
            self._succeed(text)
        elif kind == b"-":
            self._fail(refusal(text))
        else:
            self._fail(BulkRefused(f"the store answered {line[:80].decode(errors='replace')}"))
        return False

    def _finish(self) -> None:
        if self._line == b"\r\n":
            self._succeed(self._memory)
        else:
            self._fail(BulkRefused("bytes after the value"))

    def _succeed(self, value: Received | bytes | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(value)

    def _fail(self, error: BulkError) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
        self.close()


def _unobserved(filled: int) -> None:
    """The default progress callback, which does nothing."""
