"""Embeddings and scores by an unmodified vLLM behind our proxy are those of transformers, with pictures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from support.data.adapters import merged, write_adapter
from support.data.oracle import hidden_states
from support.data.pictures import picture
from support.data.retrieval import as_embedder, as_reranker, pair_score, pooled
from support.processes.cluster import data_url
from support.stores.server import StoreServer
from support.vllm_engine.checkpoints import vllm_checkpoint
from support.vllm_engine.front_door import cluster, namespace_of
from support.vllm_engine.server import VllmServer
from triptych.base.config import PDConfig
from triptych.pd_worker.vllm.adapters import lora_flags, read_adapters
from triptych.pd_worker.vllm.pooled import pooling_flags

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 1e-5
ARCHITECTURE = "Qwen3VLForConditionalGeneration"
TEXTS = [f"the {n}th harbour lies " + "between two hills " * (n % 5) for n in range(12)]
IMAGES = [picture(5, 64, 48), picture(6, 48, 64)]


def started(make: Callable[[Path], Path], folder: Path) -> Iterator[tuple[Path, StoreServer, VllmServer]]:
    path = make(vllm_checkpoint("qwen3_vl", folder / "qwen3_vl"))
    store = StoreServer(folder / "store")
    extra = {"store": store.url, "namespace": namespace_of(path), "wait_seconds": 2}
    write_adapter(path, adapter_of(path), 1)
    config = PDConfig(model=str(path), dtype="float32", lora_modules=modules_of(path))
    words = pooling_flags(path, ARCHITECTURE) + lora_flags(read_adapters(config), "cpu")
    server = VllmServer(path, folder / "vllm.log", "ec_consumer", extra, words)
    try:
        store.start()
        server.start()
        yield path, store, server
    finally:
        server.stop()
        store.kill()


def adapter_of(path: Path) -> Path:
    return path.with_name("sql")


def modules_of(path: Path) -> str:
    return f"sql={adapter_of(path)}"


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, StoreServer, VllmServer]]:
    yield from started(as_embedder, tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, StoreServer, VllmServer]]:
    yield from started(as_reranker, tmp_path_factory.mktemp("judge"))


@asynccontextmanager
async def asking(
    served: tuple[Path, StoreServer, VllmServer], folder: Path, *words: str
) -> AsyncIterator[Callable[..., Any]]:
    """Posts a body to a path of the proxy: the status, and the reply."""
    http = httpx2.AsyncClient(timeout=120.0)
    async with asyncio.timeout(400), cluster(*served, folder, vllm_words=words) as url, http:
        while (await http.get(f"{url}/ready")).status_code != 200:
            await asyncio.sleep(0.2)

        async def ask(path: str, **body: Any) -> tuple[int, Any]:
            reply = await http.post(f"{url}{path}", json=body)
            return reply.status_code, reply.json()

        yield ask


def close(given: Any, expected: Any) -> None:
    assert np.abs(np.asarray(given) - expected).max() <= TOLERANCE


def part(image: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


async def test_texts_and_pictures_are_embedded_as_transformers_does(embedder, tmp_path):
    path = embedder[0]
    async with asking(embedder, tmp_path) as ask:
        _, tokens = await ask("/tokenize", prompt=TEXTS[1])
        status, reply = await ask("/v1/embeddings", input=TEXTS)
        assert status == 200, reply
        whole = pooled(hidden_states(path, tokens["tokens"])[0])
        close(reply["data"][1]["embedding"], whole)
        assert len({item["embedding"][0] for item in reply["data"]}) == len(TEXTS)
        _, cut = await ask("/v1/embeddings", input=tokens["tokens"], dimensions=16)
        close(cut["data"][0]["embedding"], whole[:16] / np.linalg.norm(whole[:16]))
        content = [part(IMAGES[0]), {"type": "text", "text": "between"}, part(IMAGES[1])]
        status, reply = await ask(
            "/v1/embeddings", messages=[{"role": "user", "content": content}], add_generation_prompt=True
        )
        assert status == 200, reply
        slots = [{"type": "image"} if "image_url" in one else one for one in content]
        hidden, _ = hidden_states(path, [{"role": "user", "content": slots}], IMAGES)
        close(reply["data"][0]["embedding"], pooled(hidden))


async def test_an_adapter_embeds_as_the_checkpoint_that_it_is_merged_into(embedder, tmp_path):
    path = embedder[0]
    folder = merged(path, adapter_of(path), tmp_path / "merged")
    content = [part(IMAGES[0]), {"type": "text", "text": "between"}]
    asked = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": True}
    slots = [{"role": "user", "content": [{"type": "image"}, content[1]]}]
    async with asking(embedder, tmp_path, "--lora-modules", modules_of(path)) as ask:
        _, tokens = await ask("/tokenize", model="sql", prompt=TEXTS[1])
        for name, reference in (("sql", folder), (path.name, path), ("sql", folder)):
            status, texts = await ask("/v1/embeddings", model=name, input=TEXTS[:3])
            assert status == 200, texts
            close(texts["data"][1]["embedding"], pooled(hidden_states(reference, tokens["tokens"])[0]))
            status, pictured = await ask("/v1/embeddings", model=name, **asked)
            assert status == 200, pictured
            close(pictured["data"][0]["embedding"], pooled(hidden_states(reference, slots, [IMAGES[0]])[0]))
        apart = pooled(hidden_states(folder, tokens["tokens"])[0])
        assert np.abs(apart - pooled(hidden_states(path, tokens["tokens"])[0])).max() > 1000 * TOLERANCE


async def test_what_this_vllm_does_not_pool_is_refused_by_name(embedder, tmp_path):
    async with asking(embedder, tmp_path) as ask:
        status, reply = await ask("/v1/embeddings", input="hello", pooling="mean")
        assert (status, reply["error"]["param"]) == (400, "pooling"), reply
        status, reply = await ask("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
        assert status == 400 and "/v1/embeddings" in reply["error"]["message"]
        content = [part(IMAGES[0]), {"type": "text", "text": "<|im_end|>"}]
        status, reply = await ask("/v1/embeddings", messages=[{"role": "user", "content": content}])
        assert status == 400 and "--engine native" in reply["error"]["message"]


async def test_documents_with_pictures_are_scored_as_transformers_does(judge, tmp_path):
    path, query = judge[0], "Where do ships land?"
    async with asking(judge, tmp_path) as ask:
        status, reply = await ask(
            "/v1/rerank", query=query, documents=[TEXTS[1], TEXTS[2], {"image": data_url(IMAGES[0])}]
        )
        assert status == 200, reply
        scores = {one["index"]: one["relevance_score"] for one in reply["results"]}
        expected = [
            pair_score(path, query, TEXTS[1]),
            pair_score(path, query, TEXTS[2]),
            pair_score(path, query, [{"type": "image"}], [IMAGES[0]]),
        ]
        close([scores[n] for n in range(3)], expected)
        status, reply = await ask("/v1/score", text_1=query, text_2=TEXTS[1:3])
        close([one["score"] for one in reply["data"]], expected[:2])


async def test_an_adapter_scores_as_the_checkpoint_that_it_is_merged_into(judge, tmp_path):
    path, query = judge[0], "Where do ships land?"
    folder = merged(path, adapter_of(path), tmp_path / "merged")
    documents = [TEXTS[1], TEXTS[2], {"image": data_url(IMAGES[0])}]
    async with asking(judge, tmp_path, "--lora-modules", modules_of(path)) as ask:
        found = []
        for name, reference in (("sql", folder), (path.name, path), ("sql", folder)):
            status, reply = await ask("/v1/rerank", model=name, query=query, documents=documents)
            assert status == 200, reply
            scores = {one["index"]: one["relevance_score"] for one in reply["results"]}
            found.append([scores[n] for n in range(3)])
            texts = [pair_score(reference, query, text) for text in TEXTS[1:3]]
            close(found[-1], [*texts, pair_score(reference, query, [{"type": "image"}], [IMAGES[0]])])
            status, reply = await ask("/v1/score", model=name, text_1=query, text_2=TEXTS[1:3])
            assert status == 200, reply
            close([one["score"] for one in reply["data"]], texts)
        assert np.abs(np.subtract(found[0], found[1])).max() > 1000 * TOLERANCE
