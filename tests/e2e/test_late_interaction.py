"""Late-interaction models through a cluster: vectors of tokens, and documents ranked by MaxSim."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

import triptych
from support.channels import connected_channel
from support.data.pictures import picture
from support.data.retrievers import RETRIEVERS, WIDTH, build_retriever, processed, score, vectors, with_text
from support.processes.cluster import Cluster, data_url, start_cluster
from triptych.protos import proxy_pb2, proxy_pb2_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE = 1e-5
WORDS = ("--threads", "1", "--max-num-batched-tokens", "256", "--max-model-len", "512")


@dataclass(frozen=True)
class Served:
    cluster: Cluster
    path: Path

    async def post(self, route: str, **body: Any) -> tuple[int, dict[str, Any]]:
        async with httpx2.AsyncClient(timeout=120.0) as http:
            reply = await http.post(f"{self.cluster.url}{route}", content=json.dumps(body).encode())
        return reply.status_code, reply.json()


@pytest.fixture(scope="module", params=RETRIEVERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("retriever")
    path = build_retriever(request.param, folder / "model")
    cluster = start_cluster(path, folder / "run", *WORDS)
    yield Served(cluster, path)
    cluster.stop()


def close(given: Any, expected: torch.Tensor) -> None:
    assert np.shape(given) == tuple(expected.shape)
    assert np.abs(np.asarray(given) - expected.numpy()).max() <= TOLERANCE


def part_of(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        return {"type": "text", "text": given}
    return {"type": "image_url", "image_url": {"url": data_url(given)}}


async def test_36_mixed_requests_have_the_vectors_of_transformers(served):
    draw = random.Random(53)
    calls, expected = [], []
    for n in range(36):
        text = f"where lies the {n}th harbour? " * draw.randint(1, 4)
        image = picture(n % 12, draw.randint(20, 90), draw.randint(20, 90))
        if n % 3 == 0:
            message = {"role": "query", "content": text}
            inputs = processed(served.path, text)
        elif n % 3 == 1:
            message = {"role": "user", "content": [part_of(image)]}
            inputs = processed(served.path, image)
        else:
            parts = [image, text, picture(20 + n, 40, 60)]
            message = {"role": "document", "content": [part_of(part) for part in parts]}
            inputs = with_text(served.path, parts)
        in_base64 = {"encoding_format": "base64"} if n % 2 else {}
        calls.append(served.post("/pooling", messages=[message], **in_base64))
        expected.append(vectors(served.path, inputs))
    for (status, reply), wanted in zip(await asyncio.gather(*calls), expected, strict=True):
        assert status == 200, reply
        (found,) = reply["data"]
        assert (found["object"], reply["usage"]["prompt_tokens"]) == ("pooling", len(wanted))
        given = found["data"]
        if isinstance(given, str):
            given = np.frombuffer(base64.b64decode(given), "<f4").reshape(-1, WIDTH)
        close(given, wanted)


async def test_inputs_are_prompts_as_they_are_and_come_in_order(served):
    texts = [f"{n} ships " * (1 + n % 5) for n in range(40)]
    status, reply = await served.post("/pooling", input=texts, dimensions=8)
    assert status == 200, reply
    assert [each["index"] for each in reply["data"]] == list(range(40))
    for at in (0, 7, 39):
        whole = vectors(served.path, with_text(served.path, [texts[at]]))[:, :8]
        close(reply["data"][at]["data"], torch.nn.functional.normalize(whole, dim=-1))


async def test_documents_are_ranked_by_max_sim_over_http_and_grpc(served):
    query, texts, image = "where lies the harbour?", ["a river", "between hills"], picture(3, 64, 48)
    asked = vectors(served.path, processed(served.path, query))
    documents = [with_text(served.path, [text]) for text in texts] + [processed(served.path, image)]
    expected = [score(served.path, asked, vectors(served.path, each)) for each in documents]
    given = [*texts, {"image": data_url(image)}]
    status, ranked = await served.post("/v1/rerank", query=query, documents=given)
    assert status == 200, ranked
    best = sorted(range(3), key=lambda at: -expected[at])
    assert [each["index"] for each in ranked["results"]] == best
    near = TOLERANCE * len(asked)  # a sum over the query's tokens
    for each in ranked["results"]:
        assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=near)
    _, single = await served.post("/v1/score", text_1=query, text_2=given)
    _, pairs = await served.post("/v1/score", text_1=[query] * 3, text_2=given)
    for reply in (single, pairs):
        assert [each["score"] for each in reply["data"]] == pytest.approx(expected, abs=near)
    assert pairs["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"] + 2 * len(asked)
    async with connected_channel(served.cluster.grpc_address) as channel:
        request = proxy_pb2.RerankRequest(
            query={"parts": [{"text": query}]}, documents=[{"parts": [{"text": text}]} for text in texts]
        )
        stub = proxy_pb2_grpc.ProxyServiceStub(channel)
        found = {each.index: each.score async for each in stub.Rerank(request)}
    assert found == {at: pytest.approx(expected[at], abs=near) for at in range(2)}


async def test_the_client_and_grpc_give_the_same_vectors(served):
    query, image = "where lies the harbour?", picture(5, 64, 48)
    of_query = vectors(served.path, processed(served.path, query))
    of_image = vectors(served.path, processed(served.path, image))
    texts = ["a river", "ships between two hills"]
    of_texts = [vectors(served.path, with_text(served.path, [text])) for text in texts]
    async with triptych.AsyncClient(served.cluster.url) as client:
        asked = await client.embed_tokens([{"role": "query", "content": query}])
        shown = await client.embed_tokens([{"role": "user", "content": [part_of(image)]}])
        read = await client.embed_tokens(texts, dimensions=8)
    assert asked.usage.prompt_tokens == len(of_query)
    close(asked.vectors, of_query[None])
    close(shown.vectors, of_image[None])
    for given, whole in zip(read.vectors, of_texts, strict=True):
        close(given, torch.nn.functional.normalize(whole[:, :8], dim=-1))
    messages = [{"role": "query", "parts": [{"text": query}]}]
    async with connected_channel(served.cluster.grpc_address) as channel:
        stub = proxy_pb2_grpc.ProxyServiceStub(channel)
        of_message = proxy_pb2.EmbedRequest(tokens=True, messages=messages)
        of_inputs = proxy_pb2.EmbedRequest(tokens=True, inputs=[{"text": text} for text in texts])
        [found] = [each async for each in stub.Embed(of_message)]
        several = [each async for each in stub.Embed(of_inputs)]
    assert found.prompt_tokens == len(of_query)
    close(np.reshape(found.values, (found.prompt_tokens, -1)), of_query)
    assert [each.index for each in several] == [0, 1]
    for each, expected in zip(several, of_texts, strict=True):
        close(np.reshape(each.values, (each.prompt_tokens, -1)), expected)


def test_so_does_the_command_line(served: Served, tmp_path: Path) -> None:
    query, image = "where lies the harbour?", picture(5, 64, 48)
    image.save(tmp_path / "page.png")
    for words, of_it in ((["--query", query], query), (["--image", str(tmp_path / "page.png")], image)):
        command = [sys.executable, "-m", "triptych.apps.cli", "embed", "--tokens", *words]
        printed = subprocess.check_output([*command, "--url", served.cluster.url], text=True, timeout=120)
        given = [json.loads(line) for line in printed.splitlines()]
        close(given, vectors(served.path, processed(served.path, of_it)))


@pytest.mark.parametrize(
    ("route", "body", "param", "says"),
    [
        ("/v1/embeddings", {"input": "x"}, "model", "/pooling"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "model", "/pooling"),
        ("/v1/completions", {"prompt": "x"}, "model", "/pooling"),
        ("/pooling", {"input": "x", "dimensions": WIDTH + 1}, "dimensions", str(WIDTH)),
        ("/pooling", {"input": [1] * 600}, "input", "512"),
        ("/pooling", {"input": [319]}, "input", "image tokens"),
    ],
)
async def test_what_it_does_not_give_is_refused_by_name(served, route, body, param, says):
    status, reply = await served.post(route, **body)
    assert status == 400
    assert reply["error"]["param"] == param, reply
    assert says in reply["error"]["message"]
