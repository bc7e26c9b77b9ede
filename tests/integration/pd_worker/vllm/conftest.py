"""A scripted vLLM server, and a PD worker in front of it that waits little, for each test that asks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.vllm.scripted_server import ScriptedServer, scripted_server
from support.vllm.serving import Served, fronting
from triptych.pd_worker.vllm import health, run
from triptych.store.embedding_store import EmbeddingStore


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is looked after, and asked again, sooner than a deployed one."""
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(health, "_LOOK_WHILE_DOWN", 0.05)
    monkeypatch.setattr(run, "_FIRST_PAUSE", 0.01)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as started:
        yield started


@pytest.fixture
async def served(server: ScriptedServer, store: EmbeddingStore) -> AsyncIterator[Served]:
    async with fronting(server, store) as opened:
        yield opened
