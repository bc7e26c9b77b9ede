"""A real Valkey starts with the rendered StatefulSet's command and users."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from support.kubernetes.chart import render
from support.kubernetes.manifests import called, main_container
from support.processes.cluster import free_port
from support.waiting import until
from triptych.launch.embedded_store import find_server_binary


def accepts(port: int) -> bool:
    """Whether the server accepts connections, as its startup probe asks."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
async def passwords_and_port(tmp_path: Path) -> AsyncIterator[tuple[dict[str, str], int]]:
    """The store's passwords by role, and the port of a server that runs as its container would."""
    manifests = render({"colocatedPools": [{"name": "both"}]})
    secret = called(manifests, "Secret", "triptych-store")["stringData"]
    (tmp_path / "users.acl").write_text(secret["users.acl"])
    container = main_container(called(manifests, "StatefulSet", "triptych-store"))
    port = free_port()
    here = {
        "6379": str(port),
        "/data": str(tmp_path),
        "/etc/triptych/store/users.acl": str(tmp_path / "users.acl"),
    }
    words = [here.get(word, word) for word in container["args"]]
    with subprocess.Popen([str(find_server_binary()), *words, "--bind", "127.0.0.1"]) as server:
        try:
            yield {role: secret[role] for role in ("proxy", "encoder", "pd", "colocated")}, port
        finally:
            server.terminate()


async def test_each_role_logs_in_with_its_password_and_nobody_without(
    passwords_and_port: tuple[dict[str, str], int],
) -> None:
    passwords, port = passwords_and_port
    await until(lambda: accepts(port), "the server to start")
    for role, password in passwords.items():
        async with Redis(port=port, username=f"triptych-{role}", password=password) as client:
            assert await client.ping()
            memory = await client.info("memory")
            assert memory["maxmemory"] == 4 << 30
            assert memory["maxmemory_policy"] == "volatile-lru"
            with pytest.raises(NoPermissionError):
                await client.flushall()
    async with Redis(port=port) as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.ping()
    async with Redis(port=port, username="triptych-pd", password=passwords["encoder"]) as impostor:
        with pytest.raises(AuthenticationError):
            await impostor.ping()


async def test_a_replica_writes_embeddings_as_an_encoder_and_reads_them_as_a_pd_worker(
    passwords_and_port: tuple[dict[str, str], int],
) -> None:
    passwords, port = passwords_and_port
    await until(lambda: accepts(port), "the server to start")
    async with Redis(port=port, username="triptych-colocated", password=passwords["colocated"]) as client:
        assert await client.set("ec:x", "bytes")
        assert await client.get("ec:x") == b"bytes"
        with pytest.raises(NoPermissionError):
            await client.flushall()
