"""A PD worker whose engine is an unmodified vLLM: proxy, encoder worker and store are ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.data.traffic import ask_all, expected, mixed_cases
from support.processes.proxy_process import started_proxy, started_service
from support.stores.server import StoreServer
from support.vllm_engine.engines import Engines
from support.vllm_engine.front_door import DTYPE, assert_varied_and_exact
from support.vllm_engine.server import VllmServer
from triptych.registry.registry import Registry
from triptych.store.embedding_store import EmbeddingStore

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 24
ENCODER = ("--threads", "1")
NATIVE = ("--threads", "1", "--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB")


@pytest.fixture
def store(engines: Engines) -> StoreServer:
    return engines.store


@pytest.fixture
def vllm(engines: Engines) -> VllmServer:
    return engines.servers[0]


@asynccontextmanager
async def cluster(
    checkpoint: Path, store: StoreServer, vllm: VllmServer, folder: Path, *, native: bool = False
) -> AsyncIterator[str]:
    """The address of a proxy, once its encoder worker and its PD workers are registered."""
    model = (str(checkpoint), *DTYPE)
    services = {
        "encoder": ("encoder", *model, *ENCODER),
        "vllm-pd": ("pd", *model, "--engine", "vllm", "--engine-url", vllm.url),
    }
    if native:
        services["native-pd"] = ("pd", *model, *NATIVE)
    async with contextlib.AsyncExitStack() as stack:
        for name, words in services.items():
            await stack.enter_async_context(started_service(store.url, folder / f"{name}.log", *words))
        _, port, _ = await stack.enter_async_context(started_proxy(store.url, folder / "proxy.log"))
        client = await EmbeddingStore.connect(store.url)
        stack.push_async_callback(client.close)
        registered: list[object] = []
        while len(registered) < len(services):
            await asyncio.sleep(0.2)
            registered = list(await Registry(client).workers())
        yield f"http://127.0.0.1:{port}"


async def test_mixed_requests_through_the_proxy_are_answered_as_generate_does(
    checkpoint, store, vllm, tmp_path
):
    cases = mixed_cases(24, seed=3)
    reference = await asyncio.to_thread(expected, checkpoint, cases, TOKENS)
    async with asyncio.timeout(300), cluster(checkpoint, store, vllm, tmp_path) as url:
        answers = await ask_all(url, cases, TOKENS)
    assert_varied_and_exact(reference, [answer.token_ids for answer in answers])
    assert vllm.is_alive()
