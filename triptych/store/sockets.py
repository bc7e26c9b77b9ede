"""The store's address, read from its URL and completed by files that flags name, and sockets to it."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlencode, urlsplit

from triptych.base.errors import ConfigError
from triptych.store.tls import StoreTls

_REMEDY = "write unix:///path/to/socket, redis://host:port/0, or rediss:// for TLS"

#: The names in a URL's query, which are redis-py's, of the files of TLS.
_TLS_NAMES = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}

#: In an error reply, the words before the arguments of a command that the server does not know.
_REPEATED = ", with args beginning with"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """One server. Either `path` of a unix socket or `host` and `port`, these with TLS where `tls` is set."""

    path: str = ""
    host: str = ""
    port: int = 6379
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: StoreTls | None = None

    @property
    def label(self) -> str:
        """The address as logs and messages may show it: without credentials."""
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.tls else ''}://{host}:{self.port}/{self.db}"

    def without_password(self, text: object) -> str:
        """A message of the server or a library, redacted: some repeat the command that was sent."""
        shown = str(text).partition(_REPEATED)[0]
        return shown.replace(self.password, "***") if self.password else shown

    def greeting(self) -> list[tuple[str, ...]]:
        """Commands to send on a new connection: AUTH where needed, SELECT if not only AUTH is needed.

        Never none: a server that wants a password refuses the first command, and were that a large value, it
        would close the connection, which may be seen before its answer.
        """
        commands: list[tuple[str, ...]] = []
        if self.password:
            names = (self.username,) if self.username else ()
            commands.append(("AUTH", *names, self.password))
        if self.db or not self.password:
            commands.append(("SELECT", str(self.db)))
        return commands


def parse_store_url(url: str) -> StoreAddress:
    """The address in `unix://[user:password@]/path[?db=N]` or `redis://[user:password@]host[:port][/db]`.

    `rediss://` is TLS, with the files that `with_tls_files` has put into the query. ConfigError for anything
    else; the message never repeats a password.
    """
    parts = _parts_of(url)
    port = parts.port or 6379
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix" and parts.path:
        db = parse_qs(parts.query).get("db", ["0"])[0]
        return StoreAddress(path=unquote(parts.path), db=_db(db), username=username, password=password)
    if parts.scheme in ("redis", "rediss") and parts.hostname:
        number = _db(parts.path.strip("/") or "0")
        tls = _tls(parts) if parts.scheme == "rediss" else None
        return StoreAddress(
            host=parts.hostname, port=port, db=number, username=username, password=password, tls=tls
        )
    raise ConfigError(f"--store has an unsupported scheme: {_REMEDY}")


def with_password(url: str, password: str) -> str:
    """The address with this password; ConfigError when it has one already."""
    parse_store_url(url)
    parts = _parts_of(url)
    if parts.password:
        raise ConfigError("--store has a password and --store-password-file too: leave one of them out")
    place = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{parts.username or ''}:{quote(password, safe='')}@{place}").geturl()


def with_tls_files(url: str, files: StoreTls) -> str:
    """The address with the files in its query; ConfigError for files that TLS cannot begin with."""
    if not url.startswith("rediss"):
        if files != StoreTls():
            raise ConfigError(
                "--store-ca-file, --store-cert-file and --store-key-file are for TLS to a store: name it by "
                "--store rediss://host:port/0"
            )
        return url
    parts = _parts_of(url)
    if files != StoreTls():
        if parts.query:
            raise ConfigError("--store has a query and --store-ca-file or its kin too: leave one of them out")
        named = {name: getattr(files, each) for each, name in _TLS_NAMES.items() if getattr(files, each)}
        parts = parts._replace(query=urlencode(named, quote_via=quote))
    tls = _tls(parts)
    if bool(tls.cert_file) != bool(tls.key_file):
        raise ConfigError("--store-cert-file and --store-key-file go together: give both or none")
    tls.context()
    return parts.geturl()


def _tls(parts: SplitResult) -> StoreTls:
    """The files that the URL's query names."""
    options = parse_qs(parts.query)
    if not options.keys() <= set(_TLS_NAMES.values()):
        raise ConfigError(f"--store may have {', '.join(_TLS_NAMES.values())} in its query, and nothing else")
    return StoreTls(**{each: options[name][0] for each, name in _TLS_NAMES.items() if name in options})


def redacted(url: str) -> str:
    """The address with *** in place of a password."""
    parts = _parts_of(url)
    if not parts.password:
        return url
    place = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{parts.username or ''}:***@{place}").geturl()


def _parts_of(url: str) -> SplitResult:
    """Parses a URL; ConfigError for an invalid one, and where a password would be read as another part."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ConfigError(f"--store is not a store address: {_REMEDY}") from None
    outside = parts.hostname if parts.scheme == "unix" else "@" in parts.path + parts.query
    if outside or parts.fragment:
        raise ConfigError(
            f"--store is not a store address: {_REMEDY}; in a user or password, /, ?, #, @ and % are written "
            "%2F, %3F, %23, %40 and %25"
        )
    return parts


def _db(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--store names a database that is not a number: {_REMEDY}")
    return int(text)


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
