"""Connections, and requests on them, are served in turns by address; a connection's one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from support.waiting import until
from triptych.proxy.http.connections import HELD_BYTES, PIECE_BYTES, LimitedConnection
from triptych.proxy.http.server import HttpServer, bind

MANY, ONE = "127.0.0.3", "127.0.0.1"
CONNECTIONS = 300
#: What uvloop reads at once.
READ = 256 << 10
Handler = Callable[[Request], Awaitable[PlainTextResponse]]


@contextlib.asynccontextmanager
async def served(
    handler: Handler, before: Callable[[socket.socket], None] = lambda listener: None
) -> AsyncIterator[tuple[HttpServer, int]]:
    """A server with one page; `before` is called when clients can connect and nothing accepts yet."""
    listener = bind("127.0.0.1", 0)
    listener.listen(1024)
    before(listener)
    server = HttpServer(Starlette(routes=[Route("/{name}", handler, methods=["GET", "POST"])]), listener)
    task = await server.start()
    try:
        yield server, listener.getsockname()[1]
    finally:
        await server.stop(task, linger=0.0)


def asked(address: str, listener: socket.socket, data: bytes) -> socket.socket:
    client = socket.socket()
    client.bind((address, 0))
    client.connect(listener.getsockname())
    client.sendall(data)
    return client


def get(name: object, extra: str = "") -> bytes:
    return f"GET /{name} HTTP/1.1\r\nHost: x\r\n{extra}\r\n".encode()


def run(test: Callable[[], Awaitable[None]], loop: str) -> None:
    """On the loop of a deployed proxy, or on asyncio's."""
    if loop == "uvloop":
        uvloop.run(test())
    else:
        asyncio.run(test())


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("pipelined", [1, 30])
def test_one_connection_is_served_soon_behind_many_of_another_address(loop, pipelined):
    seen: list[str] = []

    async def note(request: Request) -> PlainTextResponse:
        seen.append(request.client.host)
        return PlainTextResponse("x")

    async def test() -> None:
        with contextlib.ExitStack() as stack:

            def connect(listener: socket.socket) -> None:
                for _ in range(CONNECTIONS):
                    stack.enter_context(asked(MANY, listener, get("a") * pipelined))
                stack.enter_context(asked(ONE, listener, get("a")))

            async with served(note, connect):
                await until(lambda: len(seen) == CONNECTIONS * pipelined + 1, "all requests")

    run(test, loop)
    assert seen.index(ONE) < 20


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_request_behind_another_is_not_looked_at_before_that_has_its_reply(loop):
    names: list[str] = []

    async def test() -> None:
        gate = asyncio.Event()

        async def wait(request: Request) -> PlainTextResponse:
            names.append(request.path_params["name"])
            await gate.wait()
            return PlainTextResponse(names[-1] + ";")

        async with served(wait) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
            writer.write(b"".join(get(number) for number in range(1000)))
            await until(lambda: names == ["0"], "the first request")
            (connection,) = server.server_state.connections
            assert not connection.pipeline
            gate.set()
            await reader.readuntil(b"\r\n\r\n999;")
            writer.close()

    run(test, loop)
    assert names == [str(number) for number in range(1000)]


def test_a_client_that_sends_ever_more_behind_a_request_is_not_read_any_more():
    async def test() -> None:
        gate, names = asyncio.Event(), []

        async def wait(request: Request) -> PlainTextResponse:
            names.append(request.path_params["name"])
            if len(names) > 3:
                await gate.wait()
            else:
                await request.receive()  # makes uvicorn read on
            return PlainTextResponse("x")

        async with served(wait) as (server, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("a") * 200_000)
            await until(lambda: len(names) == 4, "a request that waits")
            (connection,) = server.server_state.connections
            await until(lambda: connection.flow.read_paused, "the end of reading")
            assert isinstance(connection, LimitedConnection)
            assert len(connection._rest) <= HELD_BYTES + READ
            writer.transport.abort()

    uvloop.run(test())


def test_a_client_that_leaves_while_little_waits_behind_its_request_is_noticed():
    async def test() -> None:
        left = asyncio.Event()

        async def wait(request: Request) -> PlainTextResponse:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            left.set()
            return PlainTextResponse("x")

        async with served(wait) as (_, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("a") + b"\r\n")
            writer.close()
            await asyncio.wait_for(left.wait(), 10)

    uvloop.run(test())


@pytest.mark.parametrize("cut", [1, 3, 7, 4096, 1 << 20])
def test_bodies_and_heads_in_any_pieces_are_what_was_sent(cut):
    chunked = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += b"1\r\nx\r\n" * 3000 + b"0\r\n\r\n"
    sized = b"POST /s HTTP/1.1\r\nHost: x\r\nContent-Length: 5004\r\n\r\n" + b"\r\n\r\n" + b"y" * 5000
    sent = (chunked + sized + get("g", f"A: {'b' * 9000}\r\n")) * 2 + get("end", "Connection: close\r\n")
    seen: list[tuple[str, bytes]] = []

    async def note(request: Request) -> PlainTextResponse:
        seen.append((request.path_params["name"], await request.body()))
        return PlainTextResponse("x")

    async def test() -> None:
        async with served(note) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
            for at in range(0, len(sent), cut):
                writer.write(sent[at : at + cut])
            replies = await reader.read(-1)
            assert replies.count(b"HTTP/1.1 200 OK") == 7
            writer.close()

    uvloop.run(test())
    bodies = [("c", b"x" * 3000), ("s", b"\r\n\r\n" + b"y" * 5000), ("g", b"")]
    assert seen == [*bodies, *bodies, ("end", b"")]


def test_a_body_in_tiny_chunks_is_handed_on_by_the_bytes_and_not_by_the_chunks(monkeypatch):
    chunks = 20_000
    sent = b"POST /c HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent += b"1\r\nx\r\n" * chunks + b"0\r\n\r\n"
    handed: list[int] = []
    on_body = HttpToolsProtocol.on_body

    def counted(connection: HttpToolsProtocol, body: bytes) -> None:
        handed.append(len(body))
        on_body(connection, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", counted)

    async def size(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    async def test() -> None:
        async with served(size) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert (await reader.read(-1)).endswith(str(chunks).encode())
            writer.close()

    uvloop.run(test())
    assert sum(handed) == chunks
    assert len(handed) <= len(sent) / PIECE_BYTES + 2


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (get("a", "Connection: Upgrade\r\nUpgrade: websocket\r\n"), b"200"),
        (get("a", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"), b"200"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00", b"400"),
    ],
)
def test_other_protocols_leave_no_line_in_the_log(sent, status, caplog):
    async def test() -> None:
        async def answer(request: Request) -> PlainTextResponse:
            return PlainTextResponse("x")

        async with served(answer) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert (await reader.readexactly(12))[9:] == status
            writer.close()

    uvloop.run(test())
    assert [record.getMessage() for record in caplog.records] == []
