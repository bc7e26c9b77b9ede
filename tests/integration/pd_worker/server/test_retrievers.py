"""Late-interaction models give the vectors, or the MaxSim, of transformers' own classes and processors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.data.pictures import picture
from support.data.retrievers import (
    RETRIEVERS,
    WIDTH,
    build_retriever,
    processed,
    score,
    vectors,
    with_text,
)
from support.engine.pd_serving import _config, serving, slot
from support.fakes.pd_client import Answer, PDClient
from triptych.base.hashing import framed_digest
from triptych.base.request import MAX_QUERY_VECTORS
from triptych.base.types import ItemPlan
from triptych.models.geometry import SpanRule
from triptych.models.registry import load_encoder
from triptych.pd_worker.frontend import input_processor
from triptych.pd_worker.native import LoadedModel, load_model
from triptych.protos import pd_pb2

TOLERANCE = 1e-5
TOKENS = pd_pb2.Pooling.TASK_TOKEN_EMBED
QUERIES = [f"where does the {n}th harbour lie? " * (1 + n % 4) for n in range(6)]
PICTURES = [picture(1, 64, 48), picture(2, 48, 96), picture(3, 33, 70)]
Content = str | list[dict[str, str]]


@dataclass(frozen=True)
class Retriever:
    model: LoadedModel
    plans: list[ItemPlan]
    bodies: list[bytes]

    @property
    def path(self) -> Path:
        return self.model.path


@pytest.fixture(scope="module", params=RETRIEVERS)
def retriever(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Retriever]:
    path = build_retriever(request.param, tmp_path_factory.mktemp("retriever"))
    encoder = load_encoder(path, device=torch.device("cpu"), dtype=torch.float32)
    model = load_model(_config(str(path)))
    items = [encoder.preprocess(image, {}) for image in PICTURES]
    plans, bodies = [], []
    for number, (item, rows) in enumerate(zip(items, encoder.encode(items), strict=True)):
        key = framed_digest((("class", request.param.encode()), ("number", bytes([number]))))
        sizes = (item.rows, encoder.width, "float32", item.length, item.runs, item.grid_thw)
        plan = ItemPlan(key, model.identity.namespace, "image", *sizes)
        plans.append(replace(plan, layout=item.layout))
        bodies.append(rows.detach().numpy().tobytes())
    yield Retriever(model, plans, bodies)


async def ask(
    client: PDClient, name: str, content: Content, items: Any = (), role: str = "document", **pooling: Any
) -> Answer:
    message = client.message(name, "", items=items)
    message.messages = json.dumps([{"role": role, "content": content}]).encode()
    message.pooling.CopyFrom(pd_pb2.Pooling(task=TOKENS, **pooling))
    reply = await client.submit(message)
    assert reply.status == pd_pb2.SubmitReply.STATUS_QUEUED, reply.error
    return await client.until(name)


def rows(answer: Answer, width: int = WIDTH) -> np.ndarray:
    assert answer.finished.reason == "stop", answer.finished.error
    assert answer.finished.completion_tokens == 0
    found = np.frombuffer(answer.finished.pooled, "<f4").reshape(-1, width)
    assert len(found) == answer.finished.prompt_tokens
    return found


def close(given: np.ndarray, expected: torch.Tensor) -> None:
    assert given.shape == tuple(expected.shape)
    assert np.abs(given - expected.numpy()).max() <= TOLERANCE


@pytest.mark.parametrize("in_chunks", [False, True])
async def test_queries_pictures_and_both_have_the_vectors_of_transformers(
    retriever, store, store_url, in_chunks
):
    # All tokens of a ColPali prompt attend to one another: it is computed whole.
    whole = any(rule.spans is not SpanRule.NONE for rule in retriever.model.decoder.layer_rules)
    tokens = 512 if not in_chunks else 160 if whole else 16
    for plan, body in zip(retriever.plans, retriever.bodies, strict=True):
        await store.save(plan, body, ttl=60)
    slots = [slot(plan) for plan in retriever.plans]
    both = [{"type": "image"}, {"type": "text", "text": "a map"}, {"type": "image"}]
    async with serving(retriever.model, store_url, max_num_batched_tokens=tokens) as (_, client):
        calls = [ask(client, f"q{n}", text, role="query") for n, text in enumerate(QUERIES)]
        calls += [ask(client, f"p{n}", [{"type": "image"}], [slots[n]]) for n in range(len(slots))]
        calls.append(ask(client, "both", both, slots[1:]))
        # Alone in the batches, and twice: nothing of them is in the prefix cache.
        calls.append(ask(client, "again", QUERIES[0], role="query"))
        answers = await asyncio.gather(*calls)
    expected = [vectors(retriever.path, processed(retriever.path, given)) for given in (*QUERIES, *PICTURES)]
    expected.append(vectors(retriever.path, with_text(retriever.path, [PICTURES[1], "a map", PICTURES[2]])))
    for answer, each in zip(answers, [*expected, expected[0]], strict=True):
        close(rows(answer), each)
        assert answer.finished.cached_tokens == 0


async def test_a_document_is_scored_by_the_max_sim_of_a_querys_vectors(retriever, store, store_url):
    await store.save(retriever.plans[0], retriever.bodies[0], ttl=60)
    async with serving(retriever.model, store_url) as (_, client):
        query = await ask(client, "query", QUERIES[2], role="query")
        given = query.finished.pooled
        page = await ask(client, "page", [{"type": "image"}], [slot(retriever.plans[0])], query=given)
        text = await ask(client, "text", "a harbour between two hills", query=given)
        cut = await ask(client, "cut", QUERIES[2], role="query", dimensions=8)
    asked = vectors(retriever.path, processed(retriever.path, QUERIES[2]))
    documents = [
        processed(retriever.path, PICTURES[0]),
        with_text(retriever.path, ["a harbour between two hills"]),
    ]
    for answer, document in zip((page, text), documents, strict=True):
        expected = score(retriever.path, asked, vectors(retriever.path, document))
        found = np.frombuffer(answer.finished.pooled, "<f4")
        assert found.shape == (1,)
        assert abs(float(found[0]) - expected) <= TOLERANCE * len(asked)
    close(rows(cut, 8), torch.nn.functional.normalize(asked[:, :8], dim=-1))


async def test_a_user_cannot_write_a_picture_or_padding(retriever, store_url):
    async with serving(retriever.model, store_url) as (_, client):
        plain = await ask(client, "plain", "<image>", role="query")
    text = processed(retriever.path, "x")["input_ids"].shape[1] - 1
    assert plain.finished.prompt_tokens == text + len("<image>")


@pytest.mark.parametrize(
    ("pooling", "param", "says"),
    [
        ({"task": pd_pb2.Pooling.TASK_EMBED}, "model", "/pooling"),
        ({"task": pd_pb2.Pooling.TASK_SCORE}, "model", "no scores"),
        ({"task": TOKENS, "method": "mean"}, "pooling", "last, mean, cls"),
        ({"task": TOKENS, "dimensions": WIDTH + 1}, "dimensions", str(WIDTH)),
        ({"task": TOKENS, "query": b"\0" * 5}, "query", str(WIDTH)),
        ({"task": TOKENS, "query": np.full(WIDTH, np.nan, "<f4").tobytes()}, "query", str(WIDTH)),
        ({"task": TOKENS, "query": b"\0" * (MAX_QUERY_VECTORS + 4 * WIDTH)}, "query", "shorten"),
    ],
)
async def test_what_a_retriever_does_not_compute_is_refused_by_name(
    retriever, store_url, pooling, param, says
):
    async with serving(retriever.model, store_url) as (_, client):
        message = client.message("r", "x")
        message.pooling.CopyFrom(pd_pb2.Pooling(**pooling))
        reply = await client.submit(message)
        generated = await client.submit(client.message("g", "x"))
    assert reply.error.param == param
    assert says in reply.error.message
    assert "/pooling" in generated.error.message


async def test_more_vectors_than_a_prompt_may_give_are_refused_and_fewer_numbers_of_them_taken(
    retriever, store_url, monkeypatch
):
    tokens = processed(retriever.path, QUERIES[0])["input_ids"].shape[1]
    monkeypatch.setattr(input_processor, "MAX_TOKEN_VECTORS", 4 * WIDTH * tokens - 1)
    async with serving(retriever.model, store_url) as (_, client):
        message = client.message("r", "")
        message.messages = json.dumps([{"role": "query", "content": QUERIES[0]}]).encode()
        message.pooling.task = TOKENS
        reply = await client.submit(message)
        fewer = await ask(client, "fewer", QUERIES[0], role="query", dimensions=WIDTH - 1)
        # A score is four bytes, however long the document is.
        query = np.ones(WIDTH, "<f4").tobytes()
        compared = await ask(client, "compared", QUERIES[0], query=query)
    assert (reply.error.code, reply.error.param) == ("context_length_exceeded", "messages")
    assert f"{tokens} tokens" in reply.error.message
    assert rows(fewer, WIDTH - 1).shape == (tokens, WIDTH - 1)
    assert len(compared.finished.pooled) == 4


@pytest.mark.parametrize("architecture", RETRIEVERS)
async def test_two_ranks_give_the_vectors_and_the_max_sim_of_one(architecture, tmp_path, store_url):
    path = build_retriever(architecture, tmp_path / "model")
    model = load_model(_config(str(path), tensor_parallel=2))
    async with serving(model, store_url, tensor_parallel=2) as (_, client):
        query = await ask(client, "query", QUERIES[1], role="query")
        compared = await ask(client, "compared", QUERIES[3], query=query.finished.pooled)
    asked = vectors(path, processed(path, QUERIES[1]))
    close(rows(query), asked)
    expected = score(path, asked, vectors(path, with_text(path, [QUERIES[3]])))
    assert abs(float(np.frombuffer(compared.finished.pooled, "<f4")[0]) - expected) <= TOLERANCE * len(asked)
