"""Pooled requests end with the vector, or the score, that transformers' own hidden states give."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from support.data.oracle import hidden_states
from support.data.pictures import picture
from support.data.retrieval import TEMPLATE, classifier, pair_score, pooled, reranker
from support.engine.pd_serving import _config, served_model, serving, slot, stored_items
from support.engine.slow_steps import slow_steps
from support.fakes.pd_client import Answer, PDClient
from triptych.pd_worker.native import LoadedModel, load_model
from triptych.protos import pd_pb2

TOLERANCE = 1e-5
SCORE = pd_pb2.Pooling.TASK_SCORE
TEXTS = [f"the {n}th harbour lies " + "between two hills and a river " * n for n in range(1, 9)]


def vector(answer: Answer) -> np.ndarray:
    assert answer.finished.reason == "stop", answer.finished.error
    assert answer.finished.completion_tokens == 0 == len(answer.token_ids)
    assert answer.finished.work_seconds > 0
    return np.frombuffer(answer.finished.pooled, "<f4")


async def embed(client: PDClient, name: str, text, items=(), **pooling) -> Answer:
    message = client.message(name, text, items=items)
    message.pooling.CopyFrom(pd_pb2.Pooling(**pooling))
    reply = await client.submit(message)
    assert reply.status == pd_pb2.SubmitReply.STATUS_QUEUED, reply.error
    return await client.until(name)


def reference(path: Path, content, images, method: str, normalize: bool) -> np.ndarray:
    hidden, _ = hidden_states(path, [{"role": "user", "content": content}], images)
    return pooled(hidden, method, normalize=normalize)


def close(given: np.ndarray, expected: np.ndarray) -> None:
    assert given.shape == expected.shape
    assert np.abs(given - expected).max() <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "llava"])
@pytest.mark.parametrize("method", ["last", "mean", "cls"])
async def test_texts_in_one_batch_and_in_chunks_have_the_vectors_of_transformers(family, method, store_url):
    model = served_model(family)
    for tokens in (512, 16):
        async with serving(model, store_url, max_num_batched_tokens=tokens, max_num_seqs=2) as (_, client):
            options = {"method": method, "normalize": method != "mean"}
            calls = [embed(client, f"r{n}", text, **options) for n, text in enumerate(TEXTS)]
            answers = await asyncio.gather(*calls)
        for text, answer in zip(TEXTS, answers, strict=True):
            close(vector(answer), reference(model.path, text, (), method, options["normalize"]))


@pytest.mark.parametrize("method", ["last", "mean", "cls"])
@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
async def test_pictures_count_and_a_cached_prefix_changes_nothing(family, method, store, store_url):
    model, pictures = served_model(family), [picture(1, 64, 48), picture(2, 48, 96)]
    items = stored_items(family, pictures)
    for item in items:
        await store.save(*item, ttl=60)
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": TEXTS[3]}]
    slots = [slot(plan) for plan, _ in items]
    expected = reference(model.path, content, pictures, method, True)
    async with serving(model, store_url, max_num_batched_tokens=48) as (_, client):
        first = await embed(client, "first", content, slots, method=method)
        again = await embed(client, "again", content, slots, method=method)
    close(vector(first), expected)
    close(vector(again), expected)
    assert (again.finished.cached_tokens > 0) is (method == "last")


async def test_token_ids_are_pooled_as_they_are_and_dimensions_cut_before_the_length_is_one(store_url):
    model = served_model("qwen3_vl")
    ids = [17, 31, 45, 99, 17]
    hidden, _ = hidden_states(model.path, ids)
    async with serving(model, store_url) as (_, client):
        message = client.message("r1", "")
        message.ClearField("messages")
        message.prompt.token_ids.ids.extend(ids)
        message.pooling.dimensions = 24
        await client.submit(message)
        answer = await client.until("r1")
    close(vector(answer), torch.nn.functional.normalize(hidden[-1][:24], dim=-1).numpy())
    assert answer.finished.prompt_tokens == len(ids)


async def test_generation_goes_on_beside_pooled_requests_which_take_no_slot(store_url):
    model = served_model("qwen3_vl")
    async with serving(model, store_url, max_num_seqs=1) as (worker, client):
        hurry = slow_steps(worker.engine)
        await client.submit(client.message("long", "tell", max_tokens=300, ignore_eos=True))
        await client.until("long", tokens=1)
        await client.submit(client.message("queued", "tell", max_tokens=2, ignore_eos=True))
        for n, text in enumerate(TEXTS):
            answer = await embed(client, f"e{n}", text, method=("last", "mean")[n % 2])
            vector(answer)
        assert client.answers["long"].finished is None, "pooled requests have waited for the slot"
        assert client.answers["queued"].finished is None
        hurry()
        assert (await client.until("long")).finished.completion_tokens == 300
        assert (await client.until("queued")).finished.completion_tokens == 2
        assert worker.engine.scheduler.kv.num_used == 0


async def test_what_a_model_cannot_pool_is_refused_by_name(store_url):
    async with serving(served_model("qwen3_vl"), store_url) as (_, client):
        for pooling, param in (
            (pd_pb2.Pooling(dimensions=65), "dimensions"),
            (pd_pb2.Pooling(method="max"), "pooling"),
            (pd_pb2.Pooling(task=SCORE), "model"),
        ):
            message = client.message(f"r{param}", "x")
            message.pooling.CopyFrom(pooling)
            reply = await client.submit(message)
            assert reply.status == pd_pb2.SubmitReply.STATUS_REFUSED
            assert reply.error.param == param


@pytest.fixture(scope="module")
def scorer(tmp_path_factory) -> LoadedModel:
    return load_model(_config(str(reranker(tmp_path_factory.mktemp("scorer") / "model"))))


@pytest.mark.parametrize("template", ["", TEMPLATE])
async def test_a_reranker_scores_pairs_with_pictures_by_two_logits_of_the_last_token(
    template, scorer, store, store_url, tmp_path
):
    """Also where its own chat template writes queries and documents."""
    model = load_model(_config(str(reranker(tmp_path / "model", template)))) if template else scorer
    (plan, body) = stored_items("qwen3_vl", [picture(3, 64, 48)])[0]
    await store.save(plan, body, ttl=60)
    documents = [TEXTS[0], TEXTS[4], [{"type": "image"}, {"type": "text", "text": "a map"}]]
    async with serving(model, store_url, max_num_batched_tokens=32) as (_, client):
        for n, document in enumerate(documents):
            pair = [{"role": "query", "content": "which harbour?"}, {"role": "document", "content": document}]
            message = client.message(f"r{n}", "", items=[slot(plan)] if n == 2 else [])
            message.messages = json.dumps(pair).encode()
            message.pooling.task = SCORE
            await client.submit(message)
        answers = [await client.until(f"r{n}") for n in range(3)]
    for n, (document, answer) in enumerate(zip(documents, answers, strict=True)):
        images = [picture(3, 64, 48)] if n == 2 else []
        close(vector(answer), np.array([pair_score(scorer.path, "which harbour?", document, images)]))


async def test_a_reranker_generates_nothing(scorer, store_url):
    async with serving(scorer, store_url) as (_, client):
        reply = await client.submit(client.message("r1", "x"))
        assert reply.status == pd_pb2.SubmitReply.STATUS_REFUSED
        assert "/v1/rerank" in reply.error.message


async def test_a_class_with_a_head_of_one_label_scores_pairs_of_texts(tmp_path, store_url):
    reference = classifier(tmp_path / "model")
    model = load_model(_config(str(tmp_path / "model")))
    async with serving(model, store_url, max_num_batched_tokens=8) as (_, client):
        for n, document in enumerate(TEXTS[:3]):
            message = client.message(f"r{n}", "")
            pair = [{"role": "query", "content": "which?"}, {"role": "document", "content": document}]
            message.messages = json.dumps(pair).encode()
            message.pooling.task = SCORE
            await client.submit(message)
        answers = [await client.until(f"r{n}") for n in range(3)]
        message.request_id, message.pooling.task = "embedding", pd_pb2.Pooling.TASK_EMBED
        reply = await client.submit(message)
    assert reply.error.param == "model"
    for document, answer in zip(TEXTS[:3], answers, strict=True):
        ids = torch.tensor([model.tokenizer.encode("which?", document).ids])
        with torch.no_grad():
            logits = reference(input_ids=ids, token_type_ids=torch.zeros_like(ids)).logits
        close(vector(answer), torch.sigmoid(logits[0]).numpy())


async def test_two_ranks_pool_and_score_as_one(tmp_path, store_url):
    path = reranker(tmp_path / "model")
    model = load_model(_config(str(path), tensor_parallel=2))
    options = {"tensor_parallel": 2, "max_num_batched_tokens": 32}
    async with serving(model, store_url, **options) as (_, client):
        message = client.message("pair", "")
        pair = [{"role": "query", "content": "which?"}, {"role": "document", "content": TEXTS[3]}]
        message.messages = json.dumps(pair).encode()
        message.pooling.task = SCORE
        await client.submit(message)
        mean = await embed(client, "mean", TEXTS[2], method="mean", normalize=True)
        scored = await client.until("pair")
    close(vector(scored), np.array([pair_score(path, "which?", TEXTS[3])]))
    close(vector(mean), reference(path, TEXTS[2], (), "mean", True))
