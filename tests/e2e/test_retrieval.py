"""Embeddings and scores of a cluster are those of transformers, through the openai package and plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from grpc import aio
from openai import AsyncOpenAI, BadRequestError

from support.channels import connected_channel
from support.chaos.stages import hold
from support.data.checkpoints import build_checkpoint
from support.data.oracle import hidden_states
from support.data.pictures import picture
from support.data.retrieval import pair_score, pooled, reranker
from support.processes.cluster import Cluster, data_url, start_cluster, wait_for
from triptych import Client
from triptych.base.errors import InvalidRequest
from triptych.protos import proxy_pb2, proxy_pb2_grpc

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-5
WORDS = ("--threads", "1", "--max-num-batched-tokens", "64", "--max-model-len", "512")
TEXTS = [f"the {n}th harbour lies " + "between two hills " * (n % 7) for n in range(40)]


@dataclass(frozen=True)
class Served:
    cluster: Cluster
    path: Path

    @property
    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.cluster.url}/v1", api_key="-", max_retries=0, timeout=120.0)

    async def post(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with httpx2.AsyncClient(timeout=120.0) as http:
            reply = await http.post(f"{self.cluster.url}{route}", content=json.dumps(body).encode())
        return reply.status_code, reply.json()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("embedder")
    path = build_checkpoint("qwen3_vl", folder / "qwen3_vl")
    cluster = start_cluster(path, folder / "run", *WORDS)
    yield Served(cluster, path)
    cluster.stop()


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("scorer")
    path = reranker(folder / "judge")
    cluster = start_cluster(path, folder / "run", *WORDS)
    yield Served(cluster, path)
    cluster.stop()


def of_ids(path: Path, ids: list[int]) -> np.ndarray:
    return pooled(hidden_states(path, ids)[0])


def close(given: Any, expected: np.ndarray) -> None:
    assert np.abs(np.asarray(given) - expected).max() <= TOLERANCE


async def test_inputs_of_every_form_are_embedded_as_transformers_does(embedder):
    _, tokenized = await embedder.post("/tokenize", {"prompt": TEXTS[3]})
    ids = tokenized["tokens"]
    async with embedder.client as client:
        for given, count in ((TEXTS[3], 1), ([TEXTS[3]], 1), (ids, 1), ([ids, ids], 2)):
            reply = await client.embeddings.create(model="qwen3_vl", input=given)
            assert [item.index for item in reply.data] == list(range(count))
            for item in reply.data:
                close(item.embedding, of_ids(embedder.path, ids))
            assert reply.usage.prompt_tokens == reply.usage.total_tokens == count * len(ids)
        cut = await client.embeddings.create(
            model="qwen3_vl", input=ids, dimensions=16, encoding_format="float"
        )
    whole = of_ids(embedder.path, ids)[:16]
    close(cut.data[0].embedding, whole / np.linalg.norm(whole))
    status, raw = await embedder.post("/v1/embeddings", {"input": ids, "encoding_format": "base64"})
    assert status == 200
    close(np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4"), of_ids(embedder.path, ids))


async def test_messages_with_pictures_are_embedded_as_transformers_does(embedder):
    image = picture(5, 64, 48)
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}}, {"type": "text", "text": TEXTS[2]}]
    for _ in range(2):  # encoded, then from the store
        status, reply = await embedder.post(
            "/v1/embeddings",
            {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": True},
        )
        assert status == 200, reply
        content = [{"type": "image"}, parts[1]]
        hidden, _ = hidden_states(embedder.path, [{"role": "user", "content": content}], [image])
        close(reply["data"][0]["embedding"], pooled(hidden))


async def test_a_thousand_inputs_beside_a_chat_come_in_order(embedder):
    inputs = TEXTS * 25
    chat = {"messages": [{"role": "user", "content": "tell"}], "max_tokens": 64, "ignore_eos": True}
    (status, reply), (chat_status, answer) = await asyncio.gather(
        embedder.post("/v1/embeddings", {"input": inputs}), embedder.post("/v1/chat/completions", chat)
    )
    assert (status, chat_status) == (200, 200), (reply, answer)
    assert answer["usage"]["completion_tokens"] == 64
    vectors = np.array([item["embedding"] for item in reply["data"]])
    assert [item["index"] for item in reply["data"]] == list(range(1000))
    for at in range(len(TEXTS)):
        close(vectors[at :: len(TEXTS)], vectors[at])
    first = vectors[: len(TEXTS)]
    apart = np.abs(first[:, None] - first[None]).max(-1) + np.eye(len(TEXTS))
    assert apart.min() > 100 * TOLERANCE, "two inputs have one vector"


async def test_a_client_that_leaves_takes_its_inputs_with_it(embedder):
    cluster = embedder.cluster

    def in_progress() -> float:
        page = cluster.metrics("pd")[0]
        return page["vllm:num_requests_running"] + page["vllm:num_requests_waiting"]

    def at_work() -> float:
        """Calls at the proxy, and then, when none submits inputs any more, requests at the PD worker."""
        return cluster.metrics("proxy")[0]["triptych_requests_in_flight"] + in_progress()

    before = cluster.total("pd", "vllm:prompt_tokens_total")
    # Each begins otherwise: what is cached is not computed, and would not count.
    inputs = {"input": [f"{number}. {text}" + " and on" * 60 for number, text in enumerate(TEXTS * 20)]}
    asked = asyncio.create_task(embedder.post("/v1/embeddings", inputs))
    await hold("inputs at the PD worker", lambda: in_progress() or asked.done())
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    wait_for("the client's inputs to have ended", lambda: at_work() == 0)
    done = cluster.total("pd", "vllm:prompt_tokens_total")
    status, _ = await embedder.post("/v1/embeddings", {"input": [7] * 5})
    assert status == 200
    assert cluster.total("pd", "vllm:prompt_tokens_total") == done + 5, "inputs of the client that left"
    assert done - before < 800 * 60, "all of its inputs were computed"


@pytest.mark.parametrize(
    ("route", "body", "status", "param", "says"),
    [
        ("/v1/embeddings", {"input": "x", "dimensions": 4096}, 400, "dimensions", "64"),
        ("/v1/embeddings", {"input": [1] * 100_000}, 400, "input", "512"),
        ("/v1/embeddings", {"input": ["a", [1] * 600]}, 400, "input", "list"),
        ("/v1/embeddings", {"input": [[1], [1] * 600]}, 400, "input[1]", "512"),
        ("/v1/embeddings", {"input": []}, 400, "input", "empty"),
        ("/v1/embeddings", {"input": ""}, 400, "input", "empty"),
        ("/v1/embeddings", {"input": ["a", ""]}, 400, "input[1]", "empty"),
        ("/v1/embeddings", {"input": [[]]}, 400, "input[0]", "empty"),
        ("/v1/embeddings", {"input": "many words " * 50_000}, 400, "input", "512"),
        ("/v1/rerank", {"query": "x", "documents": ["a"] * 4096}, 400, "documents", "2048"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, 400, "query", "empty"),
        ("/v1/rerank", {"query": "x", "documents": ["a", ""]}, 400, "documents[1]", "empty"),
        ("/v1/rerank", {"query": "many words " * 50_000, "documents": ["a"]}, 400, "query", "512"),
        ("/v1/score", {"text_1": "x", "text_2": ["a"] * 4096}, 400, "text_2", "2048"),
        ("/v1/embeddings", {}, 400, "input", "messages"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "input", "2048"),
        ("/v1/embeddings", {"input": "x", "prompt_embeds": "AA=="}, 400, "prompt_embeds", "never taken"),
        (
            "/v1/embeddings",
            {"messages": [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "AA=="}]}]},
            400,
            "messages[0].content[0].type",
            "never taken",
        ),
        ("/v1/rerank", {"query": "x", "documents": []}, 400, "documents", ""),
        ("/v1/rerank", {"query": {"text": "x", "image": "y"}, "documents": ["a"]}, 400, "query", "one of"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, 400, "text_1", "as many"),
        ("/pooling", {"input": "x"}, 400, "model", "/v1/embeddings"),
    ],
)
async def test_bad_input_is_named(embedder, route, body, status, param, says):
    answered, reply = await embedder.post(route, body)
    assert answered == status, reply
    assert reply["error"]["param"] == param, reply
    assert says in reply["error"]["message"]


async def test_a_model_of_embeddings_ranks_by_cosine(embedder):
    body = {"query": TEXTS[0], "documents": [TEXTS[3], {"text": TEXTS[0]}, TEXTS[9]], "top_n": 2}
    status, reply = await embedder.post("/rerank", body)
    assert status == 200, reply
    assert len(reply["results"]) == 2
    assert reply["results"][0]["index"] == 1
    assert reply["results"][0]["document"] == {"text": TEXTS[0]}
    assert reply["results"][0]["relevance_score"] == pytest.approx(1.0, abs=TOLERANCE)
    one, two = [
        of_ids(embedder.path, (await embedder.post("/tokenize", {"prompt": text}))[1]["tokens"])
        for text in (TEXTS[0], TEXTS[3])
    ]
    status, scored = await embedder.post("/v1/score", {"text_1": TEXTS[0], "text_2": [TEXTS[3], TEXTS[0]]})
    assert scored["data"][0]["score"] == pytest.approx(float(one @ two), abs=TOLERANCE)


async def test_a_reranker_scores_texts_and_pictures_as_transformers_does(scorer):
    image = picture(3, 64, 48)
    parts = [{"type": "image_url", "image_url": data_url(image)}, {"type": "text", "text": "a map"}]
    body = {"query": "which harbour?", "documents": [TEXTS[1], {"content": parts}, TEXTS[4]]}
    status, reply = await scorer.post("/v1/rerank", body)
    assert status == 200, reply
    expected = [
        pair_score(scorer.path, "which harbour?", TEXTS[1]),
        pair_score(
            scorer.path, "which harbour?", [{"type": "image"}, {"type": "text", "text": "a map"}], [image]
        ),
        pair_score(scorer.path, "which harbour?", TEXTS[4]),
    ]
    scores = {result["index"]: result["relevance_score"] for result in reply["results"]}
    close([scores[index] for index in range(3)], np.array(expected))
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    given = {"text_1": "which harbour?", "text_2": TEXTS[1], "instruction": "Find ships."}
    _, scored = await scorer.post("/score", given)
    with_instruction = pair_score(scorer.path, "which harbour?", TEXTS[1], instruction="Find ships.")
    close(scored["data"][0]["score"], np.array(with_instruction))


async def test_a_reranker_neither_chats_nor_completes(scorer):
    async with scorer.client as client:
        with pytest.raises(BadRequestError, match="/v1/rerank"):
            await client.chat.completions.create(model="judge", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(BadRequestError, match="/v1/rerank"):
            await client.completions.create(model="judge", prompt="x")


def test_the_client_embeds_and_ranks(embedder, scorer):
    with Client(embedder.cluster.url) as client:
        ids = client.tokenize(TEXTS[5])
        made = client.embed([TEXTS[5], TEXTS[6]], dimensions=32)
        pictured = client.embed(TEXTS[2], files=picture(5, 64, 48), add_generation_prompt=True)
        with pytest.raises(InvalidRequest, match="dimension"):
            client.embed("x", dimension=3)  # type: ignore[call-arg]
    whole = of_ids(embedder.path, ids)[:32]
    close(made.vectors[0], whole / np.linalg.norm(whole))
    assert (len(made.vectors), len(made.vectors[1])) == (2, 32)
    assert made.usage.prompt_tokens > len(ids)
    content = [{"type": "image"}, {"type": "text", "text": TEXTS[2]}]
    hidden, _ = hidden_states(embedder.path, [{"role": "user", "content": content}], [picture(5, 64, 48)])
    close(pictured.vectors[0], pooled(hidden))
    with Client(scorer.cluster.url) as client:
        ranking = client.rerank("which harbour?", [TEXTS[1], TEXTS[4]], top_n=1)
    scores = [pair_score(scorer.path, "which harbour?", TEXTS[at]) for at in (1, 4)]
    assert [result.index for result in ranking.results] == [int(np.argmax(scores))]
    close(ranking.results[0].score, np.array(max(scores)))


async def test_grpc_embeds_and_ranks(embedder, scorer):
    _, tokenized = await embedder.post("/tokenize", {"prompt": TEXTS[5]})
    ids = tokenized["tokens"]
    buffer = io.BytesIO()
    picture(3, 64, 48).save(buffer, "PNG")
    async with connected_channel(embedder.cluster.grpc_address) as channel:
        stub = proxy_pb2_grpc.ProxyServiceStub(channel)
        request = proxy_pb2.EmbedRequest(inputs=[{"text": TEXTS[5]}, {"token_ids": {"ids": ids}}])
        made = [embedding async for embedding in stub.Embed(request)]
        parts = [{"image": buffer.getvalue()}, {"text": TEXTS[2]}]
        chat = proxy_pb2.EmbedRequest(messages=[{"role": "user", "parts": parts}], generation_prompt=True)
        pictured = [embedding async for embedding in stub.Embed(chat)]
        for wrong, field in (
            (proxy_pb2.EmbedRequest(inputs=[{"text": "x"}], dimensions=65), "dimensions"),
            (proxy_pb2.EmbedRequest(inputs=[{"text": "x"}, {}]), r"inputs\[1\]"),
            (proxy_pb2.EmbedRequest(), "inputs"),
        ):
            with pytest.raises(aio.AioRpcError, match=field):
                await anext(aiter(stub.Embed(wrong)))
    assert [embedding.index for embedding in made] == [0, 1]
    for embedding in made:
        close(embedding.values, of_ids(embedder.path, ids))
        assert embedding.prompt_tokens == len(ids)
    content = [{"type": "image"}, {"type": "text", "text": TEXTS[2]}]
    hidden, _ = hidden_states(embedder.path, [{"role": "user", "content": content}], [picture(3, 64, 48)])
    close(pictured[0].values, pooled(hidden))
    async with connected_channel(scorer.cluster.grpc_address) as channel:
        query = {"parts": [{"text": "which harbour?"}]}
        documents = [{"parts": [{"text": TEXTS[at]}]} for at in (1, 4, 9)]
        ask = proxy_pb2.RerankRequest(query=query, documents=documents, top_n=2)
        ranked = [document async for document in proxy_pb2_grpc.ProxyServiceStub(channel).Rerank(ask)]
    scores = [pair_score(scorer.path, "which harbour?", TEXTS[at]) for at in (1, 4, 9)]
    assert [document.index for document in ranked] == sorted(range(3), key=lambda at: -scores[at])[:2]
    close([document.score for document in ranked], np.array([scores[document.index] for document in ranked]))
