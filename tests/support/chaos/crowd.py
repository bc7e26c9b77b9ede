"""Many clients at once, and clients that are slow, silent or gone, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from support.data.traffic import Case
from support.processes.cluster import Cluster, scrape
from support.waiting import within

_BATCH = 500


@dataclass
class Reply:
    """What one client got."""

    status: int
    retry_after: str | None
    seconds: float
    token_ids: list[int] = field(default_factory=list)
    whole: bool = False


def body_of(case: Case, tokens: int, **extra: Any) -> bytes:
    body = {
        "messages": case.client_messages(),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return json.dumps(body | extra).encode()


async def post_all(url: str, bodies: Iterable[bytes]) -> list[Reply]:
    """Every body on a connection of its own, all at once."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:
        replies = asyncio.gather(*(_post(session, url, body) for body in bodies))
        return list(await within("the replies to a crowd", replies))


async def _post(session: aiohttp.ClientSession, url: str, body: bytes) -> Reply:
    began = time.monotonic()
    async with session.post(f"{url}/v1/chat/completions", data=body) as answer:
        reply = Reply(answer.status, answer.headers.get("retry-after"), 0.0)
        async for line in answer.content:
            if line == b"data: [DONE]\n":
                reply.whole = True
            elif line.startswith(b"data: "):
                for choice in json.loads(line[6:])["choices"]:
                    reply.token_ids += choice.get("token_ids") or []
        reply.seconds = time.monotonic() - began
        return reply


async def most(cluster: Cluster, name: str, done: asyncio.Event) -> float:
    """The highest value of a gauge of the proxy that was seen until `done`."""
    highest = 0.0
    while not done.is_set():
        samples = await asyncio.to_thread(scrape, f"{cluster.url}/metrics")
        highest = max(highest, samples.get(name, 0.0))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), 0.1)
    return highest


def files(pid: int) -> int:
    """Open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


#: The crowd's address: connections are bounded by address, and other clients have one of their own.
CROWD_HOST = "127.0.0.9"


class BadClients:
    """Connections that are a burden; all are closed at the end."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._where = (where.hostname, where.port)
        self._socks: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> BadClients:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sock in self._socks:
            sock.close()

    @property
    def refused(self) -> int:
        """Connections on which the server has said or closed something."""
        return sum(_has_ended(sock) for sock in self._socks)

    async def _connect(self) -> socket.socket:
        sock = socket.socket()
        self._socks.append(sock)
        sock.setblocking(False)
        sock.bind((CROWD_HOST, 0))
        await within("a connection", asyncio.get_running_loop().sock_connect(sock, self._where))
        return sock

    async def idle(self, count: int) -> None:
        """Connections that never ask."""
        for at in range(0, count, _BATCH):
            await asyncio.gather(*(self._connect() for _ in range(min(_BATCH, count - at))))

    async def vanish_in_upload(self, *, reset: bool) -> None:
        """Half a body, then a reset or the end of it."""
        sock = await self._connect()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n"
        upload = asyncio.get_running_loop().sock_sendall(sock, head + b"x" * 1_000_000)
        try:
            await within("half an upload to be taken", upload)
        except ConnectionError:
            return  # the crowd's address has its share of connections already
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        else:
            sock.shutdown(socket.SHUT_WR)

    async def drip_headers(self) -> None:
        """A request whose headers come one byte a second."""
        sock = await self._connect()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"x" * 1000

        async def drip() -> None:
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError):
                for at in range(len(head)):
                    await loop.sock_sendall(sock, head[at : at + 1])
                    await asyncio.sleep(1)

        self._tasks.append(asyncio.create_task(drip()))

    async def read_slowly(self, body: bytes) -> None:
        """A stream of which one byte a second is read."""
        sock = await self._connect()
        loop = asyncio.get_running_loop()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        await within("a request to be taken", loop.sock_sendall(sock, head + body))

        async def sip() -> None:
            with contextlib.suppress(OSError):
                while await loop.sock_recv(sock, 1):
                    await asyncio.sleep(1)

        self._tasks.append(asyncio.create_task(sip()))


def _has_ended(sock: socket.socket) -> bool:
    """Whether the server has closed the connection, or has answered 408 or 503 before it did."""
    try:
        return bool(sock.fileno() < 0 or sock.recv(1, socket.MSG_PEEK) in (b"", b"H"))
    except BlockingIOError:
        return False
    except OSError:
        return True
