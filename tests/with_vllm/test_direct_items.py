"""vLLM reads embeddings at our encoder workers: exact with 36 requests at once, and with the store away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.data.traffic import ask_all, expected, mixed_cases
from support.fakes.fake_workers import TOKEN
from support.stores.server import StoreServer
from support.vllm_engine.checkpoints import reseeded, vllm_checkpoint
from support.vllm_engine.engines import WORDS
from support.vllm_engine.front_door import assert_varied_and_exact, cluster, namespace_of
from support.vllm_engine.server import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 16


@pytest.fixture(scope="module")
def seed() -> int:
    drawn = random.SystemRandom().randrange(1 << 20)
    print(f"weights and requests are of seed {drawn}")
    return drawn


@pytest.fixture(scope="module")
def drawn_checkpoint(seed: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reseeded(vllm_checkpoint("qwen3_vl", tmp_path_factory.mktemp("drawn") / "qwen3_vl"), seed)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    server = StoreServer(tmp_path_factory.mktemp("direct") / "store")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def vllm(
    drawn_checkpoint: Path, store: StoreServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("vllm")
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    extra = {
        "store": store.url,
        "namespace": namespace_of(drawn_checkpoint),
        "wait_seconds": 2,
        "internal_token_file": str(token),
    }
    server = VllmServer(drawn_checkpoint, folder / "vllm.log", "ec_consumer", extra, WORDS)
    server.start()
    yield server
    server.stop()


async def test_36_requests_at_once_and_new_pictures_without_the_store_equal_generate(
    drawn_checkpoint, store, vllm, seed, tmp_path
):
    cases, new = mixed_cases(36, seed=seed), mixed_cases(8, seed=seed + 1)
    reference = await asyncio.to_thread(expected, drawn_checkpoint, cases + new, TOKENS)
    async with asyncio.timeout(600), cluster(drawn_checkpoint, store, vllm, tmp_path) as url:
        assert "vLLM reads embeddings from encoder workers" in (tmp_path / "vllm-pd.log").read_text()
        answers = await ask_all(url, cases, TOKENS)
        store.kill()
        away = await ask_all(url, new, TOKENS)
        store.start()
    outputs = [answer.token_ids for answer in (*answers, *away)]
    assert_varied_and_exact(reference, outputs)
    assert vllm.is_alive()


async def test_with_rows_in_8_bits_vllm_answers_as_the_native_engine(
    drawn_checkpoint, store, vllm, seed, tmp_path
):
    """Both make the same floating point of them; the store has them in 8 bits, and one shape of each row."""
    cases, words = mixed_cases(12, seed=seed + 2), ("--ec-store-rows", "int8")
    answers = []
    for engine in ("vllm", "native"):
        folder = tmp_path / engine
        folder.mkdir()
        server = vllm if engine == "vllm" else None
        native = engine == "native"
        async with (
            asyncio.timeout(400),
            cluster(drawn_checkpoint, store, server, folder, native=native, encoder_words=words) as url,
        ):
            answers.append([answer.token_ids for answer in await ask_all(url, cases, TOKENS)])
        assert "embeddings are stored in 8 bits" in (folder / "encoder.log").read_text()
    assert answers[0] == answers[1]
    assert len({token for answer in answers[0] for token in answer}) > 10
