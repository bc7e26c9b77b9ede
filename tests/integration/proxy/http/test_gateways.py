"""Clients behind one gateway have quotas of their own; whoever is no gateway has its own address's alone."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from support.fakes.proxy_fakes import FakeCluster
from support.hostile.two_tenants import two_tenants
from support.waiting import until
from triptych.proxy.http.peers import TrustedProxies
from triptych.store.embedding_store import EmbeddingStore

QUOTAS = {"connections": {"capacity": 8}}
HTTP_GATEWAY = TrustedProxies("127.0.0.0/8")
TCP_GATEWAY = TrustedProxies("127.0.0.0/8", proxy_protocol=True)
ONE, OTHER = "192.0.2.1", "192.0.2.2"


class Gateway:
    """Connections from one address, which say that they are of others."""

    def __init__(
        self, cluster: FakeCluster, stack: AsyncExitStack, trust: ssl.SSLContext | None = None
    ) -> None:
        self._cluster = cluster
        self._stack = stack
        self._trust = trust

    async def ask(self, headers: str = "", before: bytes = b"") -> int:
        """The status of a request on a connection of its own, which stays open; 0: closed without one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._cluster.port)
        self._stack.callback(writer.close)
        writer.write(before)
        if self._trust is not None:
            await writer.start_tls(self._trust, server_hostname="127.0.0.1")
        writer.write(f"GET /version HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
        async with asyncio.timeout(30.0):
            try:
                line = await reader.readline()
            except ConnectionError:
                return 0
        return int(line.split()[1]) if line else 0

    async def forwarded(self, *addresses: str) -> int:
        return await self.ask(f"X-Forwarded-For: {', '.join(addresses)}\r\n")


def version_1(client: str) -> bytes:
    return f"PROXY TCP4 {client} 127.0.0.1 4711 8000\r\n".encode()


def version_2(client: str) -> bytes:
    addresses = socket.inet_aton(client) + socket.inet_aton("127.0.0.1") + struct.pack("!HH", 4711, 8000)
    return b"\r\n\r\n\x00\r\nQUIT\n" + struct.pack("!BBH", 0x21, 0x11, len(addresses)) + addresses


async def test_clients_behind_an_http_gateway_have_their_own_share(store):
    async with FakeCluster(store, trusted=HTTP_GATEWAY, quotas=QUOTAS) as cluster, AsyncExitStack() as stack:
        gateway = Gateway(cluster, stack)
        assert [await gateway.forwarded(ONE) for _ in range(6)] == [200] * 4 + [503] * 2
        assert await gateway.forwarded(OTHER) == 200
        assert await gateway.forwarded(OTHER, ONE) == 503, "only what the gateway has added counts"
        assert await gateway.forwarded(ONE, OTHER) == 200
        assert [cluster.quotas["connections"].held(name) for name in (ONE, OTHER)] == [4, 2]


async def test_who_is_no_gateway_cannot_choose_its_address(store: EmbeddingStore) -> None:
    trusted = TrustedProxies("10.0.0.0/8")
    async with FakeCluster(store, trusted=trusted, quotas=QUOTAS) as cluster, AsyncExitStack() as stack:
        gateway = Gateway(cluster, stack)
        found = [await gateway.forwarded(f"192.0.2.{index}") for index in range(6)]
        assert found == [200] * 4 + [503] * 2
        assert cluster.quotas["connections"].held("127.0.0.1") == 4
    trusted = TrustedProxies("10.0.0.0/8", proxy_protocol=True)
    async with FakeCluster(store, trusted=trusted) as cluster, AsyncExitStack() as stack:
        assert await Gateway(cluster, stack).ask(before=version_1(ONE)) == 400


@pytest.mark.parametrize("header", [version_1, version_2])
async def test_clients_behind_a_tcp_gateway_have_their_own_share(store, header):
    assert callable(header)
    async with FakeCluster(store, trusted=TCP_GATEWAY, quotas=QUOTAS) as cluster, AsyncExitStack() as stack:
        gateway = Gateway(cluster, stack)
        # A client's own header is not read where the gateway has said who it is.
        forged = f"X-Forwarded-For: {OTHER}\r\n"
        found = [await gateway.ask(forged, header(ONE)) for _ in range(6)]
        assert found == [200] * 4 + [503] * 2
        assert await gateway.ask(before=header(OTHER)) == 200
        assert await gateway.ask() == 0, "a gateway that does not say whose connection it is"


async def test_a_tcp_gateway_says_so_before_the_handshake(store: EmbeddingStore, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        tenants = await two_tenants(store, tmp_path, stack, tls=True, trusted=TCP_GATEWAY, quotas=QUOTAS)
        gateway = Gateway(tenants.cluster, tenants.stack, tenants.trust)
        for header in (version_1, version_2):
            assert await gateway.ask(before=header(ONE)) == 401
        assert tenants.cluster.quotas["connections"].held(ONE) == 2
        plain = Gateway(tenants.cluster, tenants.stack)
        assert await plain.ask(before=b"\x16\x03\x01") == 0
        await until(lambda: not tenants.cluster.quotas["handshakes"].used, "the end of the handshakes")
