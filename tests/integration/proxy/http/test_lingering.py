"""A refusal before a large body is read by the client that sends it, and holds its connection for a while."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop
from starlette.applications import Starlette

from support.certificates import CertificateFolder, issue, pem_of
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.base.rpc.tls.certificates import Certificates
from triptych.proxy.auth.keys import KeyLimits, KeyRing
from triptych.proxy.http import lingering
from triptych.proxy.http.connections import ConnectionLimits
from triptych.proxy.http.server import HttpServer, bind
from triptych.store.embedding_store import EmbeddingStore

#: More than the buffers of both ends hold: whoever sends it before it reads meets a reset in place of a reply
#: where nobody reads on.
LARGE = b"x" * (24 << 20)
KEY = "sk-secret-0123456789"
CHAT = "/v1/chat/completions"
#: Nothing but the limit under test ends a connection.
LONG = ConnectionLimits(head_seconds=60, window_seconds=60, sweep_seconds=0.05)


def by_urllib(port: int, path: str, body: bytes, trust: ssl.SSLContext | None = None) -> tuple[int, bytes]:
    """The body is sent as a whole before anything is read; the connection ends with the reply."""
    scheme = "https" if trust else "http"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}{path}", body, timeout=30, context=trust)
    with refused.value as reply:
        return reply.code, reply.read()


def in_chunks(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    """As `by_urllib`, without a length before the body."""

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(body), 1 << 20):
            yield body[at : at + (1 << 20)]

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", path, pieces(), {"Connection": "close"}, encode_chunked=True)
        reply = connection.getresponse()
        return reply.status, reply.read()


def by_socket(port: int, data: bytes) -> bytes:
    """Everything is sent before anything is read."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        reply = b""
        while part := connection.recv(1 << 16):
            reply += part
        return reply


@pytest.mark.parametrize("send", [by_urllib, in_chunks])
@pytest.mark.parametrize(
    ("refusal", "path", "options"),
    [
        (401, CHAT, {"keys": KeyRing(KEY, "", KeyLimits()), "max_body": 64 << 20}),
        (404, "/v1/nothing", {"max_body": 64 << 20}),
        (405, "/v1/models", {"max_body": 64 << 20}),
        (413, CHAT, {"max_body": 1 << 20}),
        (429, CHAT, {"max_body": 64 << 20, "body_memory": 8 << 20}),
        (503, CHAT, {"max_body": 64 << 20, "quotas": {"connections": {"capacity": 0, "largest": 0}}}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else None,
)
async def test_who_sends_a_large_body_reads_its_refusal(
    store: EmbeddingStore, refusal: int, path: str, options: dict[str, Any], send: Any
) -> None:
    async with FakeCluster(store, connections=LONG, **options) as cluster:
        status, reply = await asyncio.to_thread(send, cluster.port, path, LARGE)
        assert (status, reply[:1]) == (refusal, b"{")
        await until(lambda: not cluster.http.server_state.connections, "the connection's end")
        assert not cluster.bodies.used


async def test_who_has_no_place_reads_so_before_its_large_body_is_parsed(store: EmbeddingStore) -> None:
    async with FakeCluster(store, connections=LONG, max_body=64 << 20) as cluster:
        places = cluster.dispatcher.quotas["requests"]
        with places.hold("", places.free):
            for send in (by_urllib, in_chunks):
                status, _ = await asyncio.to_thread(send, cluster.port, CHAT, LARGE)
                assert status == 429
        await until(lambda: not cluster.http.server_state.connections, "the connection's end")


@pytest.mark.parametrize("tls", [False, True], ids=["clear", "TLS"])
@pytest.mark.parametrize("runner", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_on_each_loop_and_over_tls_too_a_large_body_is_dropped(
    tmp_path: Path, runner: Any, tls: bool
) -> None:
    authority, folder = trustme.CA(), CertificateFolder(tmp_path / "front")
    folder.write(issue(authority, "127.0.0.1"), pem_of(authority))
    trust = ssl.create_default_context(cadata=pem_of(authority).decode()) if tls else None

    async def test() -> None:
        listener = bind("127.0.0.1", 0)
        certificates = Certificates(folder.front_door) if tls else None
        server = HttpServer(Starlette(), listener, LONG, certificates)
        task = await server.start()
        status, reply = await asyncio.to_thread(
            by_urllib, listener.getsockname()[1], "/nothing", LARGE, trust
        )
        assert (status, reply) == (404, b"Not Found")
        await until(lambda: not server.server_state.connections, "the connection's end")
        await server.stop(task, linger=0.0)

    runner(test())


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost : x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nX: ", b"431"),
    ],
    ids=["no header", "no chunk", "a header without an end"],
)
async def test_what_is_no_request_is_refused_to_its_senders_face(
    store: EmbeddingStore, head: bytes, status: bytes
) -> None:
    async with FakeCluster(store, connections=LONG) as cluster:
        reply = await asyncio.to_thread(by_socket, cluster.port, head + LARGE)
        assert reply.startswith(b"HTTP/1.1 %s " % status)
        await until(lambda: not cluster.http.server_state.connections, "the connection's end")
        assert not cluster.bodies.used


REFUSED = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"


async def refused(cluster: FakeCluster, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose request has been refused, and its end told, with such a body still to come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
    writer.write(REFUSED % length)
    assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
    assert len(cluster.http.server_state.connections) == 1
    return reader, writer


async def gone(cluster: FakeCluster) -> None:
    await until(lambda: not cluster.http.server_state.connections, "the connection's end")


async def test_a_body_after_its_refusal_is_read_to_its_end_and_no_further(store: EmbeddingStore) -> None:
    async with FakeCluster(store, connections=LONG) as cluster:
        _, writer = await refused(cluster, 3)
        writer.write(b"ab")
        await writer.drain()
        [connection] = cluster.http.server_state.connections
        await until(lambda: connection._lingering.left == 1, "what has come")
        writer.write(b"c")
        await gone(cluster)
        writer.close()


async def test_a_body_after_its_refusal_is_read_up_to_a_limit(store, monkeypatch):
    monkeypatch.setattr("triptych.proxy.http.connections.LINGER_BYTES", 1 << 20)
    async with FakeCluster(store, connections=LONG) as cluster:
        _, writer = await refused(cluster, 1 << 40)
        with contextlib.suppress(OSError):
            for _ in range(64):
                writer.write(bytes(1 << 20))
                await writer.drain()
        await gone(cluster)
        writer.close()


async def test_who_sends_nothing_after_its_refusal_is_not_waited_for_long(store, monkeypatch):
    monkeypatch.setattr(lingering, "LINGER_SECONDS", 0.2)
    async with FakeCluster(store, connections=LONG) as cluster:
        _, writer = await refused(cluster, 1 << 20)
        await gone(cluster)
        writer.close()


async def test_who_sends_a_byte_now_and_then_after_its_refusal_has_one_window(store: EmbeddingStore) -> None:
    short = ConnectionLimits(head_seconds=60, window_seconds=0.5, sweep_seconds=0.05)
    async with FakeCluster(store, connections=short) as cluster:
        _, writer = await refused(cluster, 1 << 20)
        async with asyncio.timeout(30):
            while cluster.http.server_state.connections:
                with contextlib.suppress(OSError):
                    writer.write(b"x")
                await asyncio.sleep(0.02)
        writer.close()


async def test_a_connection_that_lingers_keeps_its_place(store: EmbeddingStore) -> None:
    quotas = {"connections": {"capacity": 1, "share": 1.0}}
    async with FakeCluster(store, connections=LONG, quotas=quotas) as cluster:
        _, writer = await refused(cluster, 1 << 20)
        assert cluster.quotas["connections"].used == 1
        status, _ = await asyncio.to_thread(by_urllib, cluster.port, CHAT, b"{}")
        assert status == 503
        writer.close()
        await gone(cluster)
        assert cluster.quotas["connections"].used == 0


async def test_a_server_that_ends_does_not_wait_for_connections_that_linger(store: EmbeddingStore) -> None:
    async with FakeCluster(store, connections=LONG) as cluster:
        _, writer = await refused(cluster, 1 << 20)
        [connection] = cluster.http.server_state.connections
        connection.shutdown()
        await gone(cluster)
        writer.close()
