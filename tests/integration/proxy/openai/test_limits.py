"""Limits that the door keeps: nothing of what it refuses reaches a worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.fakes.fake_workers import MODEL
from support.fakes.proxy_fakes import FakeCluster, raw_post
from support.waiting import until
from triptych.base.request import MAX_CHARS_PER_TOKEN
from triptych.store.embedding_store import EmbeddingStore

LONG = "x" * (256 * MAX_CHARS_PER_TOKEN + 1)
CHAT = {"messages": [{"role": "user", "content": LONG}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 4}, "messages"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/messages", {**CHAT, "max_tokens": 4}, "messages"),
        ("/v1/messages/count_tokens", CHAT, "messages"),
        ("/tokenize", CHAT, "messages"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
    ],
)
async def test_a_text_that_no_worker_takes_is_refused_before_one_renders_it(
    store: EmbeddingStore, path: str, body: dict[str, Any], param: str
) -> None:
    async with FakeCluster(store) as cluster:
        worker = cluster.pd_workers[0]
        worker.max_model_len = 256
        assert worker.register is not None
        await worker.register(worker.info)
        await until(lambda: cluster.pool.limits_of(MODEL) == [256], "the worker's limit")
        status, _, raw = await raw_post(cluster.port, json.dumps(body).encode(), path=path)
        error = json.loads(raw)["error"]
        assert status == 400 and error["code"] == "context_length_exceeded"
        assert error["param"] == param and "256 tokens" in error["message"]
        assert not worker.submits and not worker.questions
