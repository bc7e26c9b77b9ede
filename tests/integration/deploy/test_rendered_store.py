"""A real Valkey starts with the rendered StatefulSet's command and users, and answers its probes."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError

from support.kubernetes.chart import Manifest, render
from support.kubernetes.manifests import called, main_container
from support.processes.cluster import free_port
from support.tools import tool
from support.waiting import until
from triptych.apps.launch.embedded_store import find_server_binary

#: A client takes a refused login for a lost connection, and tries again after seconds.
ONCE = Retry(NoBackoff(), 0)


def accepts(port: int) -> bool:
    """Whether the server accepts connections, as its startup probe asks."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def run_container(
    folder: Path, manifests: list[Manifest], binary: str
) -> Iterator[tuple[Manifest, Manifest, int, subprocess.Popen[bytes]]]:
    """The store's Secret and container, and the port and the process of a server that runs as it would."""
    secret = called(manifests, "Secret", "triptych-store")["stringData"]
    (folder / "users.acl").write_text(secret["users.acl"])
    container = main_container(called(manifests, "StatefulSet", "triptych-store"))
    port = free_port()
    words = on_this_machine(folder, port, container["args"])
    with subprocess.Popen([binary, *words, "--bind", "127.0.0.1"]) as server:
        try:
            yield secret, container, port, server
        finally:
            server.kill()


def on_this_machine(folder: Path, port: int, words: list[str]) -> list[str]:
    """The container's words with the port and the files of the test."""
    here = {"6379": str(port), "/data": str(folder)}
    return [
        str(folder / Path(word).name) if word.startswith("/etc/") else here.get(word, word) for word in words
    ]


@pytest.fixture
async def passwords_and_port(tmp_path: Path) -> AsyncIterator[tuple[dict[str, str], int]]:
    """The store's passwords by role, and the port of a server that runs as its container would."""
    shown = render({"colocatedPools": [{"name": "both"}], "tls": {"enabled": False}})
    with run_container(tmp_path, shown, str(find_server_binary())) as (secret, _, port, _):
        yield {role: secret[role] for role in ("proxy", "encoder", "pd", "colocated")}, port


async def test_each_role_logs_in_with_its_password_and_nobody_without(passwords_and_port):
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
    async with Redis(port=port, retry=ONCE) as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.ping()
    pair = {"username": "triptych-pd", "password": passwords["encoder"]}
    async with Redis(port=port, retry=ONCE, **pair) as impostor:
        with pytest.raises(AuthenticationError):
            await impostor.ping()


async def test_a_replica_writes_embeddings_as_an_encoder_and_reads_them_as_a_pd_worker(passwords_and_port):
    passwords, port = passwords_and_port
    await until(lambda: accepts(port), "the server to start")
    async with Redis(port=port, username="triptych-colocated", password=passwords["colocated"]) as client:
        assert await client.set("ec:x", "bytes")
        assert await client.get("ec:x") == b"bytes"
        with pytest.raises(NoPermissionError):
            await client.flushall()


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_the_probes_ask_the_server_and_find_one_that_hangs(tmp_path: Path, tls: bool) -> None:
    """With the client and the server of Debian's Redis, which has both."""
    # An option that the older server does not have.
    newer = {"--tls-auto-reload-interval", "3600"}
    shown = render({"tls": {"enabled": tls}})
    for name, content in called(shown, "Secret", "triptych-tls")["stringData"].items() if tls else ():
        (tmp_path / name).write_text(content)
    container = main_container(called(shown, "StatefulSet", "triptych-store"))
    container["args"] = [word for word in container["args"] if word not in newer]
    with run_container(tmp_path, shown, tool("redis-server")) as (_, container, port, server):
        await until(lambda: accepts(port), "the server to start")
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            words = on_this_machine(tmp_path, port, probe["exec"]["command"])
            words[0] = tool("redis-cli")

            def answers(words: list[str] = words, seconds: float = probe["timeoutSeconds"]) -> bool:
                try:
                    return subprocess.run(words, timeout=seconds, check=False).returncode == 0
                except subprocess.TimeoutExpired:
                    return False

            assert await asyncio.to_thread(answers)
            server.send_signal(signal.SIGSTOP)
            assert accepts(port), "the kernel accepts for it"
            assert not await asyncio.to_thread(answers)
            server.send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(answers)
        server.kill()
        server.wait()
        assert not await asyncio.to_thread(answers)
