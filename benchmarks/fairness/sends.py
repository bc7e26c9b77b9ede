"""What a client sends: one POST, one gRPC call, or many GETs on a connection whose replies nobody reads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import Any

from grpc import aio

SERVICE = "/triptych.v1.ProxyService/"
#: Methods whose reply is one message.
UNARY = frozenset({f"{SERVICE}ListModels", "/grpc.health.v1.Health/Check"})
#: Of connections that read nothing, so that their replies wait in the server.
_SMALL_BUFFER = 2304
#: Such connections of one client; the oldest gives way.
_MAX_UNREAD = 128


@dataclass(frozen=True, slots=True)
class Post:
    """One POST over a connection of its own."""

    path: str
    body: bytes
    content_type: str = "application/json"
    #: The client goes with the first bytes of the reply.
    leaves: bool = False

    @property
    def doors(self) -> frozenset[str]:
        """Where it goes, as `Flood.doors` names it."""
        return frozenset({f"POST {self.path}"})


@dataclass(frozen=True, slots=True)
class Call:
    """One gRPC call of a full method name, whose message is these bytes; it is given up after `seconds`."""

    method: str
    message: bytes
    seconds: float = 120.0

    @property
    def doors(self) -> frozenset[str]:
        return frozenset({self.method})


@dataclass(frozen=True, slots=True)
class Gets:
    """GETs of these paths, pipelined `times` over. `read`: their replies are read, else it stays."""

    paths: tuple[str, ...]
    times: int = 1
    read: bool = True

    @property
    def doors(self) -> frozenset[str]:
        return frozenset(f"GET {path}" for path in self.paths)


@dataclass(frozen=True, slots=True)
class Raw:
    """Bytes of HTTP as they are, of which the replies are read until the server closes; `{key}` is the
    client's credentials. `path`: where the last request goes."""

    path: str
    data: bytes

    @property
    def doors(self) -> frozenset[str]:
        return frozenset({self.path})


@dataclass(frozen=True, slots=True)
class Calls:
    """One gRPC call, so many times at once over one connection."""

    call: Call
    count: int

    @property
    def doors(self) -> frozenset[str]:
        return self.call.doors


Send = Post | Call | Gets | Raw | Calls


@dataclass(frozen=True, slots=True)
class Door:
    """Where a proxy listens on loopback."""

    port: int
    grpc_port: int


class Client:
    """A client with one API key, or none. Whatever it has open ends with `async with`."""

    def __init__(self, door: Door, key: str, address: str = "127.0.0.1") -> None:
        self._door = door
        self._key = key
        self._address = address
        self._unread: list[socket.socket] = []
        self._channel: aio.Channel | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._unread:
            connection.close()
        if self._channel is not None:
            await self._channel.close()

    async def send(self, what: Send) -> str:
        """How it ended: an HTTP status, a gRPC status, or the name of a connection's error."""
        try:
            match what:
                case Post():
                    return str((await self.post(what))[0])
                case Raw():
                    return str(
                        (await self._exchange(what.data.replace(b"{key}", self._credentials().encode())))[0]
                    )
                case Calls():
                    ended = await asyncio.gather(*(self._call(what.call) for _ in range(what.count)))
                    return max(set(ended), key=ended.count)
                case Call():
                    return await self._call(what)
                case Gets():
                    return await (self._read_all(what) if what.read else self._leave_unread(what))
        except (OSError, EOFError) as error:
            return type(error).__name__

    async def post(self, what: Post) -> tuple[int, bytes]:
        """Status and body; 0 where the connection ended without a reply."""
        head = f"POST {what.path} HTTP/1.1\r\nHost: localhost\r\n{self._credentials()}"
        head += f"Content-Type: {what.content_type}\r\nContent-Length: {len(what.body)}\r\n"
        head += "Connection: close\r\n\r\n"
        return await self._exchange(head.encode(), what.body, whole=not what.leaves)

    def _credentials(self) -> str:
        return f"Authorization: Bearer {self._key}\r\n" if self._key else ""

    async def _exchange(self, head: bytes, body: bytes = b"", whole: bool = True) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._door.port, local_addr=(self._address, 0), limit=1 << 20
        )
        try:
            writer.write(head)
            writer.write(body)
            # A refusal may come before the body's end, and the connection's end with it.
            reply = await reader.read(-1 if whole else 1 << 16)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        status = int(reply[9:12]) if reply.startswith(b"HTTP/1.1 ") else 0
        return status, reply.partition(b"\r\n\r\n")[2]

    async def _read_all(self, what: Gets) -> str:
        head = f"Host: localhost\r\n{self._credentials()}\r\n"
        close = f"Connection: close\r\n{head}"
        paths = what.paths * what.times
        lines = [f"GET {path} HTTP/1.1\r\n{head}" for path in paths[:-1]]
        status, _ = await self._exchange("".join([*lines, f"GET {paths[-1]} HTTP/1.1\r\n{close}"]).encode())
        return str(status)

    async def _leave_unread(self, what: Gets) -> str:
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        self._unread.append(own)
        own.setblocking(False)
        own.bind((self._address, 0))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(own, ("127.0.0.1", self._door.port))
        head = f"Host: localhost\r\n{self._credentials()}\r\n"
        lines = "".join(f"GET {path} HTTP/1.1\r\n{head}" for path in what.paths * what.times)
        await loop.sock_sendall(own, lines.encode())
        if len(self._unread) > _MAX_UNREAD:
            self._unread.pop(0).close()
        return "unread"

    async def _call(self, what: Call) -> str:
        if self._channel is None:
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
            self._channel = aio.insecure_channel(f"127.0.0.1:{self._door.grpc_port}", options=options)
        metadata = (("authorization", f"Bearer {self._key}"),) if self._key else ()
        try:
            if what.method in UNARY:
                unary: Any = self._channel.unary_unary(what.method)
                await unary(what.message, metadata=metadata, timeout=what.seconds)
            else:
                stream: Any = self._channel.stream_stream(what.method)
                async for _ in stream(iter([what.message]), metadata=metadata, timeout=what.seconds):
                    pass
        except aio.AioRpcError as error:
            return error.code().name
        return "OK"
