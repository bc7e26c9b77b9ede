"""HTTPS and gRPC with TLS at the proxy's front door: what holds in clear text holds there too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc import aio

from support.certificates import CertificateFolder, issue, pem_of
from support.fakes.fake_workers import MODEL, whole_text
from support.fakes.proxy_fakes import FakeCluster
from triptych.apps.client import AsyncClient
from triptych.base.errors import InvalidRequest
from triptych.base.rpc.tls.certificates import Certificates
from triptych.protos import proxy_pb2, proxy_pb2_grpc
from triptych.proxy.http.connections import ConnectionLimits
from triptych.store.embedding_store import EmbeddingStore

HELLO = [{"role": "user", "content": "x"}]
#: Nothing but the limit under test ends a connection.
LONG = ConnectionLimits(head_seconds=60, window_seconds=60, sweep_seconds=0.05)


class Front:
    """The front door's files, the CA that they come from, and clients that trust it."""

    def __init__(self, path: Path) -> None:
        self.authority = trustme.CA()
        self.folder = CertificateFolder(path)
        self.renew()

    def renew(self, authority: trustme.CA | None = None) -> None:
        """A new certificate, of this CA from now on."""
        self.authority = authority or self.authority
        self.folder.write(issue(self.authority, "127.0.0.1", "models.example.com"), pem_of(self.authority))

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=pem_of(self.authority).decode())


@pytest.fixture
def front(tmp_path: Path) -> Front:
    return Front(tmp_path / "front")


@contextlib.asynccontextmanager
async def served(
    store: EmbeddingStore, front: Front, limits: ConnectionLimits = LONG, **options: Any
) -> AsyncIterator[FakeCluster]:
    certificates = Certificates(front.folder.front_door)
    async with FakeCluster(
        store, front_door=certificates, trust=front.trust, connections=limits, **options
    ) as cluster:
        yield cluster


@pytest.fixture
async def cluster(store: EmbeddingStore, front: Front) -> AsyncIterator[FakeCluster]:
    async with served(store, front) as cluster:
        yield cluster


async def connected(
    cluster: FakeCluster, context: ssl.SSLContext
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", cluster.port, ssl=context)


def serial_of(writer: asyncio.StreamWriter) -> str:
    return str(writer.get_extra_info("ssl_object").getpeercert()["serialNumber"])


async def test_openais_client_and_ours_are_answered_over_https(cluster: FakeCluster, front: Front) -> None:
    assert await cluster.stream(HELLO, max_tokens=4) == whole_text(4)
    reply = await cluster.ask(HELLO, max_tokens=4)
    assert reply.choices[0].message.content == whole_text(4)
    async with AsyncClient(f"https://127.0.0.1:{cluster.port}", ca_file=str(front.folder.ca)) as client:
        assert await client.ask("x", max_tokens=4) == whole_text(4)
    async with AsyncClient(f"https://127.0.0.1:{cluster.port}") as client:
        with pytest.raises(InvalidRequest, match="not trusted.*--ca-file"):
            await client.ask("x")
    with pytest.raises(InvalidRequest, match="no CA certificates"):
        AsyncClient(f"https://127.0.0.1:{cluster.port}", ca_file=str(front.folder.key))


async def test_a_long_body_and_a_long_reply_pass_through_tls(cluster: FakeCluster, front: Front) -> None:
    messages = [{"role": "user", "content": "x" * 900_000}]
    assert await cluster.stream(messages, max_tokens=500) == whole_text(500)


async def test_grpc_is_answered_over_tls_without_a_clients_certificate(cluster, front):
    credentials = grpc.ssl_channel_credentials(pem_of(front.authority))
    async with aio.secure_channel(f"127.0.0.1:{cluster.grpc_port}", credentials) as channel:
        reply = await proxy_pb2_grpc.ProxyServiceStub(channel).ListModels(
            proxy_pb2.ListModelsRequest(), timeout=10.0
        )
        assert list(reply.models) == [MODEL]
    async with aio.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        with pytest.raises(aio.AioRpcError):
            await proxy_pb2_grpc.ProxyServiceStub(channel).ListModels(
                proxy_pb2.ListModelsRequest(), timeout=10.0
            )


async def test_http_1_1_and_tls_1_2_or_later_are_agreed_on(cluster: FakeCluster, front: Front) -> None:
    context = front.trust
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await connected(cluster, context)
    found = writer.get_extra_info("ssl_object")
    assert (found.selected_alpn_protocol(), found.version()) == ("http/1.1", "TLSv1.3")
    writer.close()
    old = front.trust
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await connected(cluster, old)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    _, writer = await connected(cluster, old)
    writer.close()


async def test_a_new_certificate_holds_for_new_connections_and_old_ones_go_on(cluster, front):
    reader, writer = await connected(cluster, front.trust)
    before = serial_of(writer)
    front.renew(trustme.CA())

    async def renewed() -> bool:
        try:
            _, other = await connected(cluster, front.trust)
        except ssl.SSLError:
            return False
        found = serial_of(other)
        other.close()
        return found != before

    async with asyncio.timeout(20.0):
        while not await renewed():
            await asyncio.sleep(0.1)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_clients_that_speak_before_they_are_accepted_or_read_are_answered(cluster, front):
    for _ in range(20):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        side = front.trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
        plain = socket.create_connection(("127.0.0.1", cluster.port))
        plain.sendall(outgoing.read())
        reader, writer = await asyncio.open_connection(sock=plain)
        while True:
            incoming.write(await reader.read(1 << 16))
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            break
        side.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        writer.write(outgoing.read())
        answer = b""
        async with asyncio.timeout(20.0):
            while b"\r\n\r\n" not in answer:
                incoming.write(await reader.read(1 << 16))
                with contextlib.suppress(ssl.SSLWantReadError):
                    answer += side.read(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_clear_text_at_the_tls_port_is_cut_off_and_others_are_served(cluster, front):
    for sent in (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 1000, b"\x16\x03\x01\xff\xff" * 9):
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
        writer.write(sent)
        async with asyncio.timeout(15.0):
            assert b"HTTP/1.1" not in await reader.read()
        writer.close()
        assert await cluster.stream(HELLO, max_tokens=2) == whole_text(2)


async def test_a_handshake_that_never_ends_is_cut_off(store: EmbeddingStore, front: Front) -> None:
    limits = ConnectionLimits(head_seconds=0.3, window_seconds=60, sweep_seconds=0.05)
    async with served(store, front, limits) as cluster:
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
        writer.write(b"\x16\x03\x01")
        async with asyncio.timeout(10.0):
            assert await reader.read() == b""
        writer.close()


async def test_a_connection_that_says_nothing_after_its_handshake_is_closed(store, front):
    limits = ConnectionLimits(head_seconds=0.3, window_seconds=0.3, sweep_seconds=0.05)
    async with served(store, front, limits) as cluster:
        reader, writer = await connected(cluster, front.trust)
        async with asyncio.timeout(10.0):
            assert await reader.read() == b""
        writer.close()
        body = json.dumps({"model": MODEL, "messages": HELLO}).encode()
        reader, writer = await connected(cluster, front.trust)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + body
        )
        async with asyncio.timeout(10.0):
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
