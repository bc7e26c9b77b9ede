"""Limits that the door keeps: nothing of what it refuses reaches a worker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.fakes.fake_workers import MODEL
from support.fakes.proxy_fakes import FakeCluster, raw_post
from support.waiting import until
from triptych.base.request import MAX_CHARS_PER_TOKEN
from triptych.proxy.admission import LARGE_SUBMIT
from triptych.proxy.pd.link import PDLink
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


@pytest.mark.parametrize(("characters", "at_once"), [(LARGE_SUBMIT, 1), (10, 4)])
async def test_large_choices_of_a_call_are_made_and_sent_one_after_another(
    cluster: FakeCluster, characters: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sending, most = 0, 0
    submit = PDLink.submit

    async def counted(link: PDLink, message: Any) -> Any:
        nonlocal sending, most
        sending += 1
        most = max(most, sending)
        await asyncio.sleep(0)  # the others could begin now
        try:
            return await submit(link, message)
        finally:
            sending -= 1

    monkeypatch.setattr(PDLink, "submit", counted)
    worker = cluster.pd_workers[0]
    reply = await cluster.ask([{"role": "user", "content": "x" * characters}], n=4)
    assert len(reply.choices) == 4 and len(worker.submits) == 4
    assert most == at_once
    assert len({submit.messages for submit in worker.submits}) == 1


async def test_a_choice_that_has_ended_while_others_were_sent_is_not_sent(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def never(link: PDLink, message: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(PDLink, "submit", never)
        asking = asyncio.create_task(cluster.ask([{"role": "user", "content": "x" * LARGE_SUBMIT}], n=4))
        await begun.wait()
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: cluster.dispatcher.in_flight == 0, "the end of the call")
    assert not cluster.pd_workers[0].submits
    await cluster.ask([{"role": "user", "content": "x"}])
