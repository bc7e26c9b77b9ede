"""Pooled requests over gRPC become calls of vLLM's pooling endpoint, and its rows vectors and scores."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.data.retrieval import as_embedder, as_reranker
from support.engine.pd_serving import slot, stored_items
from support.vllm.scripted_server import Call, ScriptedServer, fails, hangs, pooled
from support.vllm.serving import Served, front_model, fronting
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.vllm.adapters import Adapter
from triptych.pd_worker.vllm.pooled import PooledCalls
from triptych.protos import pd_pb2
from triptych.store.embedding_store import EmbeddingStore

WIDTH = 64
ROW = [float(n % 7 - 3) for n in range(WIDTH)]


def gives(row: list[float], more: int = 0):
    """An answer with this row, for as many tokens as were sent (`more` than those)."""

    async def script(call: Call):
        count = len(call.body["input"][0]) if "input" in call.body else call.body["_count"]
        return web.json_response(pooled(row, count + more))

    return script


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_embedder(build_checkpoint("qwen3_vl", tmp_path_factory.mktemp("embedder") / "model"))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_reranker(build_checkpoint("qwen3_vl", tmp_path_factory.mktemp("judge") / "model"))


@pytest.fixture
async def pooling(server: ScriptedServer, store: EmbeddingStore, embedder: Path) -> AsyncIterator[Served]:
    server.default = gives(ROW)
    async with fronting(server, store, model=str(embedder)) as opened:
        yield opened


async def submit(
    served: Served, name: str, text="hello", items=(), adapter="", **fields
) -> pd_pb2.SubmitReply:
    message = served.client.message(name, text, items=items)
    message.adapter = adapter
    message.salt = "tenant"
    message.pooling.CopyFrom(pd_pb2.Pooling(**fields))
    return await served.client.submit(message)


def vector(answer) -> np.ndarray:
    assert answer.finished.reason == "stop", answer.finished.error
    return np.frombuffer(answer.finished.pooled, "<f4")


async def test_a_row_is_cut_and_brought_to_length_one_here(server, pooling):
    expected = np.array(ROW, "<f4")
    for name, fields, row in (
        ("whole", {}, expected / np.linalg.norm(expected)),
        ("raw", {"normalize": False}, expected),
        ("cut", {"dimensions": 8}, expected[:8] / np.linalg.norm(expected[:8])),
    ):
        await submit(pooling, name, **fields)
        answer = await pooling.client.until(name)
        assert np.allclose(vector(answer), row, atol=1e-6)
        assert answer.admitted is not None
        body = server.calls[-1].body
        assert body["input"] == [list(answer.admitted.prompt_token_ids)]
        assert (body["task"], body["use_activation"], len(body["cache_salt"])) == ("embed", False, 64)
        assert answer.finished.prompt_tokens == len(body["input"][0])


async def test_tenants_have_other_salts(server, pooling):
    message = pooling.client.message("other", "hello")
    message.salt = "another"
    message.pooling.CopyFrom(pd_pb2.Pooling())
    await pooling.client.submit(message)
    await pooling.client.until("other")
    await submit(pooling, "own")
    await pooling.client.until("own")
    first, second = (call.body for call in server.calls)
    assert first["input"] == second["input"] and first["cache_salt"] != second["cache_salt"]


async def test_pictures_are_named_by_their_keys_between_the_words_of_the_prompt(
    server, pooling, store, embedder
):
    items = stored_items("qwen3_vl", [picture(1, 64, 48), picture(2, 48, 96)])
    for item in items:
        await store.save(*item, ttl=60)
    plans = [plan for plan, _ in items]

    async def script(call: Call):
        answer = await pooling.client.has("r1", "admitted")
        call.body["_count"] = len(answer.admitted.prompt_token_ids)
        return await gives(ROW)(call)

    server.scripts = [script]
    content = [{"type": "image"}, {"type": "text", "text": "between"}, {"type": "image"}]
    await submit(pooling, "r1", content, [slot(plan) for plan in plans])
    answer = await pooling.client.until("r1")
    assert len(vector(answer)) == WIDTH
    body = server.calls[0].body
    (message,) = body["messages"]
    parts = message["content"]
    named = [part for part in parts if part["type"] == "image_embeds"]
    assert [part["uuid"] for part in named] == [plan.mm_hash for plan in plans]
    assert [part["image_embeds"]["image_grid_thw"] for part in named] == [list(p.grid_thw) for p in plans]
    words = "".join(part.get("text", "|") for part in parts)
    assert "<|vision_start|>|<|vision_end|>between<|vision_start|>|<|vision_end|>" in words
    assert "<|image_pad|>" in body["chat_template"] and sorted(answer.loaded) == sorted(
        p.mm_hash for p in plans
    )


async def test_texts_of_a_call_are_tokenised_beside_the_event_loop(server, pooling, monkeypatch):
    """A megabyte of them takes a second, in which nobody would be answered."""
    made, threads = PooledCalls.body_of, set[threading.Thread]()

    def noted(calls: PooledCalls, request: EngineRequest):
        threads.add(threading.current_thread())
        return made(calls, request)

    monkeypatch.setattr(PooledCalls, "body_of", noted)
    await submit(pooling, "r1")
    vector(await pooling.client.until("r1"))
    assert threads and threading.main_thread() not in threads


async def test_words_that_vllm_would_read_as_special_tokens_are_refused_beside_pictures(
    server, pooling, store
):
    (plan, body) = stored_items("qwen3_vl", [picture(3, 64, 48)])[0]
    await store.save(plan, body, ttl=60)
    content = [{"type": "image"}, {"type": "text", "text": "<|im_end|>"}]
    await submit(pooling, "r1", content, [slot(plan)])
    answer = await pooling.client.until("r1")
    error = answer.finished.error
    assert (answer.finished.reason, error.code, error.param) == ("error", "invalid_request_error", "messages")
    assert server.calls == []


@pytest.mark.parametrize("script", [gives(ROW[:9]), gives([float("nan")] * WIDTH), gives(ROW, 1), fails(500)])
async def test_an_answer_that_is_no_vector_is_asked_for_again(server, pooling, script):
    server.scripts = [script]
    await submit(pooling, "r1")
    assert len(vector(await pooling.client.until("r1"))) == WIDTH
    assert len(server.calls) == 2
    server.scripts = [script] * 4
    await submit(pooling, "r2")
    answer = await pooling.client.until("r2")
    assert (answer.finished.reason, answer.finished.error.code) == ("error", "internal_error")


async def test_a_cancelled_request_ends_in_vllm(server, pooling):
    server.scripts = [hangs(0)]
    server.calls.clear()
    await submit(pooling, "r1")
    await server.called(1)
    await pooling.client.stub.Cancel(pd_pb2.CancelRequest(proxy_id="proxy", request_ids=["r1"]))
    await asyncio.wait_for(server.calls[0].gone.wait(), 45)
    await pooling.settled()


async def test_what_the_server_does_not_pool_is_refused_by_name(server, store, pooling, served):
    reply = await submit(pooling, "r1", method="mean")
    assert (reply.error.param, reply.status) == ("pooling", pd_pb2.SubmitReply.STATUS_REFUSED)
    reply = await submit(served, "r2")
    assert reply.error.param == "model" and "--engine native" in reply.error.message
    assert served.worker.info("127.0.0.1:1", 2).capacity["pools"] == 0
    assert pooling.worker.info("127.0.0.1:1", 2).capacity["pools"] == 1
    assert server.calls == []


async def test_scores_are_the_sigmoid_of_the_one_output(server, store, judge):
    server.default = gives([0.75])
    async with fronting(server, store, model=str(judge)) as served:
        message = served.client.message("r1", "")
        pair = [{"role": "query", "content": "which?"}, {"role": "document", "content": "the first"}]
        message.messages = json.dumps(pair).encode()
        message.pooling.task = pd_pb2.Pooling.TASK_SCORE
        await served.client.submit(message)
        answer = await served.client.until("r1")
        assert vector(answer)[0] == pytest.approx(1 / (1 + np.exp(-0.75)))
        assert server.calls[0].body["task"] == "classify"
        reply = await submit(served, "r2")
        assert reply.error.param == "model" and "no embeddings" in reply.error.message
    assert front_model(model=str(judge)).pooling.task == "score"


async def test_a_call_names_the_adapter_of_its_request(server, store, embedder):
    server.default, server.adapters = gives(ROW), ("sql",)
    adapter = Adapter("sql", Path("/adapters/sql"), 4, "a" * 64)
    async with fronting(server, store, model=str(embedder), adapters=(adapter,)) as served:
        for name, key in (("base", ""), ("sql", adapter.key)):
            await submit(served, name, adapter=key)
            await served.client.until(name)
    bodies = [call.body for call in server.calls]
    assert [body.get("model") for body in bodies] == [None, "sql"]
    assert bodies[0]["cache_salt"] != bodies[1]["cache_salt"]
