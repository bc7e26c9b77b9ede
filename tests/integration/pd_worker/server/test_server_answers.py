"""The real worker over gRPC: right tokens, whole streams, clear refusals."""

from __future__ import annotations

import asyncio

import pytest

from support.data.oracle import assert_exact, oracle
from support.fakes.pd_client import Answer
from triptych.pd_worker.native import NativeWorker
from triptych.protos import pd_pb2

TEXTS = ("Hello there", "Count to ten, please.", "größer naïve 你好")


async def test_text_requests_get_the_tokens_that_transformers_generates(client, model):
    expected = [oracle(model.path, [{"role": "user", "content": text}], max_new_tokens=40) for text in TEXTS]
    await asyncio.gather(
        *(
            client.submit(client.message(f"r{n}", text, max_tokens=40, ignore_eos=True, temperature=0.0))
            for n, text in enumerate(TEXTS)
        )
    )
    answers = [await client.until(f"r{n}") for n in range(len(TEXTS))]
    assert [list(a.admitted.prompt_token_ids) for a in answers] == [e.prompt_token_ids for e in expected]
    assert_exact(expected, [answer.token_ids for answer in answers])
    assert [answer.finished.reason for answer in answers] == ["length"] * len(TEXTS)
    assert [answer.finished.completion_tokens for answer in answers] == [40] * len(TEXTS)
    assert all(answer.finished.work_seconds > 0 for answer in answers), "no prompt took any time"


async def test_a_resumed_request_goes_on_as_the_unbroken_one(client):
    sampling = {"max_tokens": 30, "ignore_eos": True, "temperature": 1.0, "seed": 11}
    await client.submit(client.message("whole", "Tell me", **sampling))
    whole = await client.until("whole")
    for split in (0, 1, 17, 30):
        resume = pd_pb2.Resume(
            prompt_token_ids=whole.admitted.prompt_token_ids, output_token_ids=whole.token_ids[:split]
        )
        name = f"resumed-{split}"
        message = client.message(name, "", attempt=2, resume=resume, **sampling)
        assert (await client.submit(message)).status == pd_pb2.SubmitReply.STATUS_QUEUED
        resumed = await client.until(name)
        assert resumed.token_ids == whole.token_ids
        assert resumed.text == whole.text
        assert resumed.finished.completion_tokens == 30


async def test_a_proxy_that_comes_back_misses_nothing(client, model):
    await client.submit(client.message("r1", "Tell me more", max_tokens=200, ignore_eos=True))
    answer = await client.until("r1", tokens=10)
    await client.detach()
    position = len(answer.token_ids)
    await client.attach(pd_pb2.Reattach(request_id="r1", attempt=1, position=position))
    await client.until("r1")
    assert len(answer.token_ids) == 200
    assert answer.text == model.tokenizer.decode(answer.token_ids)
    assert answer.finished.reason == "length"


async def test_a_proxy_that_names_a_request_no_more_has_it_cancelled(worker, client):
    await client.submit(client.message("r1", "Tell me more", max_tokens=400, ignore_eos=True))
    await client.until("r1", tokens=3)
    await client.detach()
    client.answers["unknown"] = Answer()
    await client.attach(pd_pb2.Reattach(request_id="unknown", attempt=1, position=0))
    assert (await client.until("unknown")).lost
    await no_requests(worker)


async def test_a_draining_worker_finishes_what_it_holds_and_refuses_the_rest(worker, client):
    await client.submit(client.message("r1", "Tell me more", max_tokens=60, ignore_eos=True))
    await client.until("r1", tokens=3)
    draining = asyncio.create_task(worker.drain(20.0))
    await asyncio.sleep(0)
    reply = await client.submit(client.message("r2", "more", attempt=2))
    assert (reply.status, reply.error.code) == (pd_pb2.SubmitReply.STATUS_REFUSED, "unavailable")
    await draining
    assert len((await client.until("r1")).token_ids) == 60


async def test_what_a_drain_cannot_finish_is_lost_and_goes_on_elsewhere(worker, client):
    await client.submit(client.message("r1", "Tell me more", max_tokens=450, ignore_eos=True))
    await client.until("r1", tokens=3)
    await worker.drain(0.0)
    worker.streams.shut_down()
    assert (await client.until("r1")).lost


LONG_RESUME = pd_pb2.Resume(prompt_token_ids=[1] * 500, output_token_ids=[40] * 20, text_sent_chars=0)


@pytest.mark.parametrize(
    "change",
    [
        {"text": "far too long " * 400},
        {"text": "x " * 600},
        {"max_tokens": 510},
        {"resume": LONG_RESUME, "attempt": 2, "ignore_eos": True},
        {"resume": LONG_RESUME, "attempt": 2, "max_tokens": 20, "ignore_eos": True},
    ],
    ids=["characters", "tokens", "output", "resumed", "resumed with a limit"],
)
async def test_what_a_worker_with_more_tokens_would_take_has_a_code_of_its_own(client, change):
    reply = await client.submit(client.message("r1", **{"text": "hello", **change}))
    assert reply.error.code == "context_length_exceeded", reply
    assert "512" in reply.error.message or "max_tokens" in reply.error.message


async def no_requests(worker: NativeWorker) -> None:
    """Within its time the engine holds nothing."""
    async with asyncio.timeout(10):
        while worker.engine.scheduler.num_running or worker.engine.scheduler.num_waiting:
            await asyncio.sleep(0.01)
    assert worker.streams.unfinished == 0
