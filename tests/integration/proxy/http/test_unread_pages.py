"""Replies to GETs that are not taken: they are counted, the next ones wait, and a reset is no error."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from support.fakes.proxy_fakes import FakeCluster
from support.hostile.two_tenants import TwoTenants, two_tenants
from support.waiting import until
from triptych.proxy.http.connections import ConnectionLimits
from triptych.proxy.http.counted_transport import CountedTransport
from triptych.proxy.http.server import HttpServer, bind

PAGE = "/page/style.css"
PIPELINED, CLIENTS = 30, 100
PAGE_BYTES = 100_000
LONG = ConnectionLimits(head_seconds=60, window_seconds=60, sweep_seconds=0.05)
SHORT = ConnectionLimits(head_seconds=60, window_seconds=0.3, sweep_seconds=0.05)
KEYLESS = "127.0.0.3"


@pytest.fixture
def large_page(monkeypatch: pytest.MonkeyPatch) -> int:
    """The bytes of a page of which a kernel takes many for a client that reads none."""
    from triptych.proxy.page.endpoint import PageFile, page_files

    monkeypatch.setitem(page_files(), "style.css", PageFile(b"x" * PAGE_BYTES, "text/css", '"etag"'))
    return PAGE_BYTES


@contextlib.asynccontextmanager
async def tenants_of(store, folder, limits, **options) -> AsyncIterator[TwoTenants]:
    async with contextlib.AsyncExitStack() as stack:
        yield await two_tenants(store, folder, stack, connections=limits, **options)


async def unread(tenants: TwoTenants, count: int) -> socket.socket:
    """A connection without a key that has asked so often for the page."""
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    tenants.stack.callback(own.close)
    own.setblocking(False)
    own.bind((KEYLESS, 0))
    loop = asyncio.get_running_loop()
    await loop.sock_connect(own, ("127.0.0.1", tenants.cluster.port))
    await loop.sock_sendall(own, f"GET {PAGE} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * count)
    return own


def written(cluster: FakeCluster) -> int:
    return sum(connection._counted._written for connection in cluster.http.server_state.connections)


async def test_the_next_page_waits_until_the_one_before_it_has_been_taken(store, tmp_path, large_page):
    async with tenants_of(store, tmp_path, LONG) as tenants:
        own = await unread(tenants, PIPELINED)
        await until(lambda: written(tenants.cluster) > large_page, "the first page")
        for _ in range(PIPELINED):
            assert await tenants.small_chat() == 200
        assert written(tenants.cluster) < 3 * large_page
        taken, loop = 0, asyncio.get_running_loop()
        while taken < PIPELINED * large_page:
            taken += len(await loop.sock_recv(own, 1 << 20))
        await until(lambda: not tenants.cluster.quotas["replies"].used, "the replies' memory")


async def test_pages_without_a_key_have_a_share_of_the_memory_for_replies_and_keys_have_theirs(
    store, tmp_path, large_page
):
    async with tenants_of(store, tmp_path, LONG, reply_memory=4 * large_page) as tenants:
        replies = tenants.cluster.quotas["replies"]
        owns = [await unread(tenants, 1) for _ in range(4)]
        await until(lambda: replies.held(f"@{KEYLESS}") == 2 * large_page, "the address's share")
        refused = [own for own in owns if (await asyncio.get_running_loop().sock_recv(own, 12))[9:] == b"429"]
        assert len(refused) == 2
        assert await tenants.small_chat() == 200


async def test_a_client_that_takes_nothing_of_a_page_is_ended(store, tmp_path, large_page):
    async with tenants_of(store, tmp_path, SHORT) as tenants:
        await unread(tenants, PIPELINED)
        await until(lambda: written(tenants.cluster) > large_page, "the first page")
        await until(lambda: not tenants.cluster.http.server_state.connections, "the connection's end")
        await until(lambda: not tenants.cluster.quotas["replies"].used, "the replies' memory")


async def _large(request: Request) -> PlainTextResponse:
    return PlainTextResponse("x" * PAGE_BYTES)


async def _reset_while_pages_wait() -> None:
    listener = bind("127.0.0.1", 0)
    server = HttpServer(Starlette(routes=[Route("/", _large)]), listener)
    task = await server.start()
    clients = []
    for _ in range(CLIENTS):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.connect(listener.getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * PIPELINED)
        clients.append(client)
    connections = server.server_state.connections
    await until(
        lambda: sum(one._counted._written > PAGE_BYTES for one in connections) == CLIENTS,
        "pages on their way",
    )
    for client in clients:
        client.close()
    await until(lambda: not server.server_state.connections, "their end")
    await server.stop(task, linger=0.0)


def test_a_client_that_resets_its_connection_leaves_no_line_in_the_log(caplog):
    """With the event loop of a deployed proxy, whose transports raise once they are closed."""
    uvloop.run(_reset_while_pages_wait())
    assert [record.getMessage() for record in caplog.records] == []


async def test_a_closed_connection_has_taken_what_was_written():
    ours, theirs = socket.socketpair()
    with theirs:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        counted = CountedTransport(transport)
        counted.write(b"x" * 100)
        transport.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ours.close()
        assert ours.fileno() == -1
        assert counted.taken == 100
        counted.write(b"x")
        assert counted.taken == 100
