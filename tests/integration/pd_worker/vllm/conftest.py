"""A scripted vLLM server, and a PD worker in front of it, for each test that asks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.vllm.scripted_server import ScriptedServer, scripted_server
from support.vllm.serving import Served, fronting
from triptych.store.embedding_store import EmbeddingStore


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as started:
        yield started


@pytest.fixture
async def served(server: ScriptedServer, store: EmbeddingStore) -> AsyncIterator[Served]:
    async with fronting(server, store) as opened:
        yield opened
