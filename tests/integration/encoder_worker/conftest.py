"""One tiny encoder for all tests of this folder."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.engine.encoder_bench import Bench, OpenBench, bench
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.models.base import EncoderSide
from triptych.models.registry import load_encoder
from triptych.store.embedding_store import EmbeddingStore


@pytest.fixture(scope="session")
def encoder() -> EncoderSide:
    return load_encoder(build_checkpoint("qwen3_vl"), device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture
def open_bench(encoder: EncoderSide, store: EmbeddingStore, store_url: str) -> OpenBench:
    return functools.partial(bench, encoder, store, store_url)


@pytest.fixture
async def b(open_bench: OpenBench) -> AsyncIterator[Bench]:
    """A worker with the default flags."""
    async with open_bench() as opened:
        yield opened


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedStore]:
    """A store that a test may stop and start."""
    server = EmbeddedStore(tmp_path, 64 << 20)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def own_store(server: EmbeddedStore) -> AsyncIterator[EmbeddingStore]:
    store = await EmbeddingStore.connect(server.url)
    yield store
    await store.close()
