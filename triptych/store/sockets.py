"""Sockets to the store: plain and TLS, non-blocking."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from triptych.store.address import StoreAddress


def command(*args: str | bytes) -> bytes:
    """A command encoded in RESP."""
    frames = [b"*%d\r\n" % len(args)]
    for word in args:
        raw = word.encode() if isinstance(word, str) else word
        frames.append(b"$%d\r\n%s\r\n" % (len(raw), raw))
    return b"".join(frames)


T = TypeVar("T")

#: Buffers passed to one sendmsg; the kernel takes a few hundred KiB at a time.
_BUFFERS_AT_ONCE = 8
_PEERCRED = struct.Struct("3i")
#: Bytes encrypted before the event loop runs other tasks again.
_ENCRYPTED_AT_ONCE = 256 << 10


class Wire(Protocol):
    """A connected non-blocking socket. OSError when the connection breaks."""

    @property
    def usable(self) -> bool:
        """Whether it is open, with no unexpected bytes received."""

    async def send(self, pending: list[memoryview]) -> None: ...

    async def receive(self, nbytes: int) -> bytes:
        """At least one byte and at most `nbytes`; none at the end of the stream."""

    def close(self) -> None: ...


class PlainWire:
    """A wire without TLS, which sends several buffers by one system call."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @property
    def usable(self) -> bool:
        return _silent(self._sock)

    async def send(self, pending: list[memoryview]) -> None:
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

    async def receive(self, nbytes: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._sock, nbytes)

    def close(self) -> None:
        self._sock.close()


class TlsWire:
    """A wire with TLS, which encrypts straight from the caller's buffers into the socket."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    @classmethod
    async def open(cls, sock: socket.socket, context: ssl.SSLContext, host: str) -> TlsWire:
        """The wire after its handshake, in which the server's certificate was verified for `host`."""
        wire = cls(context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False))
        try:
            await wire._done(wire._sock.do_handshake)
        except BaseException:
            wire.close()
            raise
        return wire

    @classmethod
    async def accept(cls, sock: socket.socket, context: ssl.SSLContext) -> TlsWire:
        """The server's end after its handshake; the context decides which clients it takes."""
        wire = cls(context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))
        try:
            await wire._done(wire._sock.do_handshake)
        except BaseException:
            wire.close()
            raise
        return wire

    @property
    def usable(self) -> bool:
        return _silent(self._sock)

    async def send(self, pending: list[memoryview]) -> None:
        for buffer in pending:
            rest = buffer.cast("B")
            while rest:
                piece = rest[:_ENCRYPTED_AT_ONCE]
                # OpenSSL wants the same bytes again until it has taken them.
                rest = rest[await self._done(partial(self._sock.send, piece)) :]
                await asyncio.sleep(0)

    async def receive(self, nbytes: int) -> bytes:
        return await self._done(lambda: self._sock.recv(nbytes))

    async def _done(self, step: Callable[[], T]) -> T:
        """The result of a step of OpenSSL's, tried whenever the socket is ready for what it waits for."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                await _ready(self._sock, reading=True)
            except ssl.SSLWantWriteError:
                await _ready(self._sock, reading=False)

    def close(self) -> None:
        self._sock.close()


def _silent(sock: socket.socket) -> bool:
    """Whether the socket is open and has received nothing. What it has received is lost."""
    if sock.fileno() < 0:
        return False
    try:
        sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        pass
    return False


async def _ready(sock: socket.socket, *, reading: bool) -> None:
    loop, fd = asyncio.get_running_loop(), sock.fileno()
    ready = loop.create_future()
    add, remove = (loop.add_reader, loop.remove_reader) if reading else (loop.add_writer, loop.remove_writer)
    add(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(fd)


async def open_wire(address: StoreAddress) -> Wire:
    """A connection with TLS where the address says so. OSError, ConfigError for files that cannot be used."""
    sock = await open_socket(address)
    if address.tls is None:
        return PlainWire(sock)
    try:
        context = address.tls.context()
    except BaseException:
        sock.close()
        raise
    return await TlsWire.open(sock, context, address.host)


async def open_socket(address: StoreAddress) -> socket.socket:
    """A connected non-blocking socket without TLS. OSError if none."""
    loop = asyncio.get_running_loop()
    if address.path:
        sock = await _connected(socket.AF_UNIX, address.path, loop)
        # Abstract names have no permissions: anyone may take one.
        if address.path.startswith("\0") and not same_user(sock):
            sock.close()
            raise ConnectionRefusedError("the socket is another user's")
        return sock
    last: OSError = OSError(f"no address for {address.host}")
    for family, _, _, _, target in await loop.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    ):
        try:
            sock = await _connected(family, target, loop)
        except OSError as error:
            last = error
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    raise last


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket has this process's user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    return bool(_PEERCRED.unpack(raw)[1] == os.geteuid())


async def _connected(
    family: int, target: str | tuple[object, ...], loop: asyncio.AbstractEventLoop
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock
