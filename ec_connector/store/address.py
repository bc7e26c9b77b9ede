"""The store's address: its URL parsed, and sockets to it for bulk transfers."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit

from triptych.errors import ConfigError

_REMEDY = "write unix:///path/to/socket or redis://host:port/0"

#: In an error reply, the words before the arguments of a command that the server does not know.
_REPEATED = ", with args beginning with"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """One server. Either `path` of a unix socket or `host` and `port`."""

    path: str = ""
    host: str = ""
    port: int = 6379
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)

    @property
    def label(self) -> str:
        """The address as logs and messages may show it: without credentials."""
        return f"unix://{self.path}" if self.path else f"redis://{self.host}:{self.port}/{self.db}"

    def without_password(self, text: object) -> str:
        """A message of the server or a library, redacted: some repeat the command that was sent."""
        shown = str(text).partition(_REPEATED)[0]
        return shown.replace(self.password, "***") if self.password else shown

    def greeting(self) -> list[tuple[str, ...]]:
        """Commands to send on a new connection: AUTH and SELECT where needed."""
        commands: list[tuple[str, ...]] = []
        if self.password:
            names = (self.username,) if self.username else ()
            commands.append(("AUTH", *names, self.password))
        if self.db:
            commands.append(("SELECT", str(self.db)))
        return commands


def parse_store_url(url: str) -> StoreAddress:
    """The address in `unix://[user:password@]/path[?db=N]` or `redis://[user:password@]host[:port][/db]`.

    ConfigError for anything else; the message never repeats a password.
    """
    parts = _parts_of(url)
    port = parts.port or 6379
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix" and parts.path:
        db = parse_qs(parts.query).get("db", ["0"])[0]
        return StoreAddress(path=unquote(parts.path), db=_db(db), username=username, password=password)
    if parts.scheme == "redis" and parts.hostname:
        db = parts.path.strip("/") or "0"
        return StoreAddress(host=parts.hostname, port=port, db=_db(db), username=username, password=password)
    raise ConfigError(f"--store has an unsupported scheme: {_REMEDY}")


def with_password(url: str, password: str) -> str:
    """The address with this password; ConfigError when it has one already."""
    parse_store_url(url)
    parts = _parts_of(url)
    if parts.password:
        raise ConfigError("--store has a password and --store-password-file too: leave one of them out")
    place = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{parts.username or ''}:{quote(password, safe='')}@{place}").geturl()


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
        raise ConfigError(f"--store is no address: {_REMEDY}") from None
    outside = parts.hostname if parts.scheme == "unix" else "@" in parts.path + parts.query
    if outside or parts.fragment:
        raise ConfigError(
            f"--store is no address: {_REMEDY}; in a user or password, /, ?, #, @ and % are written %2F, "
            "%3F, %23, %40 and %25"
        )
    return parts


def _db(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--store names a database that is not a number: {_REMEDY}")
    return int(text)


def command(*words: str | bytes) -> bytes:
    """A command encoded in RESP."""
    frames = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word.encode() if isinstance(word, str) else word
        frames.append(b"$%d\r\n%s\r\n" % (len(raw), raw))
    return b"".join(frames)


async def open_socket(address: StoreAddress) -> socket.socket:
    """A connected non-blocking socket, for commands that asyncio's streams would copy. OSError if none."""
    loop = asyncio.get_running_loop()
    if address.path:
        return await _connected(socket.AF_UNIX, address.path, loop)
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
