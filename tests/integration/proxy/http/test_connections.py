"""Clients that are slow, silent or gone, on real connections; the limits are short here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from support.fakes.proxy_fakes import FakeCluster, as_json, raw_post
from support.waiting import until
from triptych.proxy.http.connections import ConnectionLimits, LimitedConnection
from triptych.proxy.http.server import HttpServer, bind
from triptych.store.embedding_store import EmbeddingStore

HELLO = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
BODY = json.dumps(HELLO).encode()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
SHORT = ConnectionLimits(head_seconds=0.3, window_seconds=0.3, sweep_seconds=0.05)
CHUNK = b"1000\r\n" + b"x" * 0x1000 + b"\r\n"
#: Nothing but the limit under test ends a connection.
LONG = ConnectionLimits(head_seconds=60, window_seconds=60, sweep_seconds=0.05)


@contextlib.asynccontextmanager
async def connected(cluster: FakeCluster) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def open_connections(cluster: FakeCluster) -> set[LimitedConnection]:
    return cluster.http.server_state.connections


async def test_a_reply_does_not_wait_until_the_one_before_it_is_acknowledged(cluster: FakeCluster) -> None:
    async with connected(cluster):
        await until(lambda: open_connections(cluster), "the connection")
        (connection,) = open_connections(cluster)
        sent_from = connection.transport.get_extra_info("socket")
        assert sent_from.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def all_closed(cluster: FakeCluster) -> None:
    await until(lambda: not open_connections(cluster))


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """Everything up to the end, which is a reset when the server closes while the client still sends."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            data += part
    return data


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(OSError):
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0.02)


async def test_headers_that_come_byte_by_byte_end_in_408(store: EmbeddingStore) -> None:
    async with FakeCluster(store, connections=SHORT) as cluster, connected(cluster) as (reader, writer):
        dripping = asyncio.create_task(drip(writer, HEAD + b"X-Slow: " + b"x" * 1000))
        reply = await all_of(reader)
        dripping.cancel()
        head, _, body = reply.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert as_json(body)["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("flood", [b"X-Flood: 1\r\n" * 6000, b"X: " + b"y" * 66000, b"x" * 66000])
async def test_headers_above_their_limit_end_in_431(store: EmbeddingStore, flood: bytes) -> None:
    async with FakeCluster(store, connections=LONG) as cluster, connected(cluster) as (reader, writer):
        writer.write(HEAD)
        await until(lambda: any(c._head_begun for c in open_connections(cluster)))
        writer.write(flood)
        reply = await all_of(reader)
        assert reply.startswith(b"HTTP/1.1 431 ")
        writer.close()  # what it would send still is waited for
        await all_closed(cluster)


async def test_a_body_that_stops_ends_in_408_and_leaves_nothing(store: EmbeddingStore) -> None:
    async with FakeCluster(store, connections=SHORT) as cluster, connected(cluster) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 900000\r\n\r\n" + b"x" * 100_000)
        head, _, body = (await all_of(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert as_json(body)["error"]["type"] == "invalid_request_error"
        await until(lambda: not cluster.bodies.used)
        await cluster.at_rest()


async def test_an_endless_body_after_its_refusal_is_cut_off(store: EmbeddingStore) -> None:
    async with (
        FakeCluster(store, connections=SHORT, max_body=1000) as cluster,
        connected(cluster) as (reader, writer),
    ):
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK)
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        pouring = asyncio.create_task(_pour(writer))
        await all_closed(cluster)
        pouring.cancel()
        await asyncio.gather(pouring, return_exceptions=True)


async def _pour(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(CHUNK)
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "half-closed"])
async def test_a_client_that_vanishes_in_its_upload_leaves_nothing(store, reset):
    async with FakeCluster(store, connections=LONG) as cluster:
        sock = socket.create_connection(("127.0.0.1", cluster.port))
        sock.sendall(HEAD + b"Content-Length: 900000\r\n\r\n" + b"x" * 100_000)
        await until(lambda: cluster.bodies.used == 100_000)
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        else:
            sock.shutdown(socket.SHUT_WR)
        await all_closed(cluster)
        await until(lambda: not cluster.bodies.used)
        sock.close()
        assert (await raw_post(cluster.port, BODY))[0] == 200


async def test_above_the_most_connections_a_request_gets_503_and_probes_get_through(store):
    limits = ConnectionLimits(head_seconds=60, sweep_seconds=0.05, spare=2)
    quotas = {"connections": {"capacity": 3, "share": 1.0, "largest": 3}}
    async with (
        FakeCluster(store, connections=limits, quotas=quotas) as cluster,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(3):
            await stack.enter_async_context(connected(cluster))
        await until(lambda: len(open_connections(cluster)) == 3)
        status, headers, body = await raw_post(cluster.port, BODY)
        assert (status, headers["retry-after"]) == (503, "5")
        assert "connections" in as_json(body)["error"]["message"]
        async with connected(cluster) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert (await all_of(reader)).startswith(b"HTTP/1.1 200 ")
        await until(lambda: len(open_connections(cluster)) == 3)
    async with FakeCluster(store, connections=limits, quotas=quotas) as cluster:
        assert (await raw_post(cluster.port, BODY))[0] == 200


async def test_connections_above_the_spare_ones_are_told_at_once_and_closed(store: EmbeddingStore) -> None:
    limits = ConnectionLimits(head_seconds=60, sweep_seconds=0.05, spare=1)
    quotas = {"connections": {"capacity": 4}}
    async with (
        FakeCluster(store, connections=limits, quotas=quotas) as cluster,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(3):
            await stack.enter_async_context(connected(cluster))
        await until(lambda: len(open_connections(cluster)) == 3)
        async with connected(cluster) as (reader, _):
            assert (await all_of(reader)).startswith(b"HTTP/1.1 503 ")


async def test_a_body_that_comes_for_ever_is_ended_in_total_and_its_memory_returns(store):
    """Each piece is enough for the minimum rate, in a window that no pause of a busy machine fills."""
    limits = ConnectionLimits(window_seconds=20.0, min_bytes=1, body_seconds=1.0, sweep_seconds=0.05)
    async with FakeCluster(store, connections=limits) as cluster, connected(cluster) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 900000\r\n\r\n")
        reply = asyncio.create_task(all_of(reader))
        while not reply.done():
            writer.write(b"x" * 1000)
            await asyncio.sleep(0.05)
        assert (await reply).startswith(b"HTTP/1.1 408 ")
        assert b"more than 1 s" in await reply
        await until(lambda: not cluster.bodies.used, "the body's memory")


async def test_a_request_while_the_one_before_it_is_answered_is_not_hurried(store: EmbeddingStore) -> None:
    async with FakeCluster(store, connections=SHORT) as cluster, connected(cluster) as (reader, writer):
        cluster.pd_workers[0].pause_at = 1
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + HEAD)
        await until(lambda: cluster.pd_workers[0].requests)
        await asyncio.sleep(SHORT.head_seconds * 2)
        cluster.pd_workers[0].gate.set()
        reply = await all_of(reader)
        assert reply.startswith(b"HTTP/1.1 200 ")
        assert reply.count(b"HTTP/1.1 408 ") == 1


async def _refuse(request: Request) -> PlainTextResponse:
    return PlainTextResponse("draining", status_code=503)


async def test_a_connection_that_was_accepted_before_the_end_is_still_answered() -> None:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = HttpServer(Starlette(routes=[Route("/", _refuse)]), listener)
    task = await server.start()
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while not server.server_state.connections:
            await asyncio.sleep(0.01)
        stopping = asyncio.create_task(server.stop(task))
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: proxy\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 503")
        writer.close()
        await stopping


async def test_a_server_that_leaves_waits_for_kept_connections_but_not_for_ever() -> None:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = HttpServer(Starlette(routes=[Route("/", _refuse)]), listener)
    task = await server.start()
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: proxy\r\n\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b"connection: close" not in head
        await reader.readexactly(len("draining"))
        # It is idle, and nobody closes it.
        await server.linger(0.2)
        assert server.server_state.connections
        leaving = asyncio.create_task(server.linger(20))
        await asyncio.sleep(0)
        writer.write(b"GET / HTTP/1.1\r\nHost: proxy\r\n\r\n")
        assert b"connection: close" in (await reader.read()).lower()
        await leaving
        assert not server.server_state.connections
        writer.close()
        await server.stop(task)
