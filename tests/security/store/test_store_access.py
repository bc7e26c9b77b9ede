"""A cluster whose store is a real Redis with TLS, client certificates and a user for each role."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAIError

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.processes.authority import Authority
from support.processes.cluster import data_url, free_port
from support.processes.proxy_process import started_proxy, started_service
from support.stores.server import StoreServer
from support.stores.users import guarded_server, role_password
from support.tools import tool
from support.waiting import within
from triptych.apps.access import user_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE = 120.0
WORKER = ("--threads", "1")


@dataclass
class GuardedStore:
    """The server, its CA and its port."""

    server: StoreServer
    authority: Authority
    port: int

    def words(self, folder: Path, role: str) -> list[str]:
        """The flags by which a role's service reaches it, but for --store."""
        password = folder / f"{role}-password"
        password.write_text(role_password(role) + "\n")
        files = self.authority.client(role)
        return [
            *("--store-password-file", str(password), "--store-ca-file", files.ca_file),
            *("--store-cert-file", files.cert_file, "--store-key-file", files.key_file),
        ]

    def url(self, role: str) -> str:
        return f"rediss://{user_name(role)}@127.0.0.1:{self.port}/0"


@pytest.fixture
def guarded_store(tmp_path: Path) -> Iterator[GuardedStore]:
    authority = Authority(tmp_path / "tls")
    certificate, key = authority.issue("server", "127.0.0.1")
    port = free_port()
    tls = {"tls_port": str(port), "tls_cert_file": str(certificate), "tls_key_file": str(key)}
    ca = {"tls_ca_cert_file": str(authority.ca_file)}
    with guarded_server(tmp_path / "store", tool("redis-server"), maxmemory="128mb", **tls, **ca) as server:
        yield GuardedStore(server, authority, port)


@asynccontextmanager
async def cluster(store: GuardedStore, folder: Path) -> AsyncIterator[AsyncOpenAI]:
    """A proxy, an encoder and a PD worker, each as its own user."""
    model = str(build_checkpoint("qwen3_vl", folder / "tiny"))
    memory = ("--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB")
    async with AsyncExitStack() as stack:
        for role, words in (("encoder", ()), ("pd", memory)):
            given = (role, model, *WORKER, *words, *store.words(folder, role))
            await stack.enter_async_context(started_service(store.url(role), folder / f"{role}.log", *given))
        _, port, _ = await stack.enter_async_context(
            started_proxy(store.url("proxy"), folder / "proxy.log", *store.words(folder, "proxy"))
        )
        client = AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=PATIENCE
        )
        yield await stack.enter_async_context(client)


async def served(client: AsyncOpenAI) -> None:
    """Returns once there is a model."""
    while True:
        with contextlib.suppress(OpenAIError):
            if (await client.models.list()).data:
                return
        await asyncio.sleep(0.2)


async def answer(client: AsyncOpenAI, seed: int) -> str:
    image = {"type": "image_url", "image_url": {"url": data_url(picture(seed))}}
    messages: Any = [{"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]}]
    reply = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
    return str(reply.choices[0].message.content)


async def test_requests_are_answered_with_one_user_and_certificate_for_each_role(tmp_path, guarded_store):
    async with cluster(guarded_store, tmp_path) as client:
        await within("the workers", served(client), PATIENCE)
        first = await asyncio.gather(*(answer(client, seed) for seed in range(6)))
        # Every certificate is renewed, and every connection closed: new ones show the new certificates.
        for role in ("proxy", "encoder", "pd"):
            guarded_store.authority.client(role)
        assert guarded_store.server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert await asyncio.gather(*(answer(client, seed) for seed in range(6))) == first
        # All embeddings are gone: encoded again, by the same users.
        guarded_store.server.call("FLUSHALL")
        assert await asyncio.gather(*(answer(client, seed) for seed in range(6))) == first
    assert guarded_store.server.call("ACL", "LOG") == []
    for name in ("proxy", "encoder", "pd"):
        log = (tmp_path / f"{name}.log").read_text()
        assert "Traceback" not in log and role_password(name) not in log, log[-2000:]
