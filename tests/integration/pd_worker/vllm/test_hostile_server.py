"""A server that breaks, lies or is slow costs its own request at most, after a bounded number of calls."""

from __future__ import annotations

import asyncio

import pytest

from support.vllm.scripted_server import Call, answer, breaks, data, event, fails, greedy
from triptych.base.hashing import prefix_root
from triptych.pd_worker.vllm.run import MAX_FAILURES

SAMPLING = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def says(*pieces: bytes, kind: str = "text/event-stream"):
    """An answer of exactly these bytes."""

    async def script(call: Call):
        response = await call.stream(kind=kind)
        for piece in pieces:
            await response.write(piece)
        return response

    return script


async def ask(served, name: str = "r1", **given):
    await served.client.submit(served.client.message(name, "hello", **{**SAMPLING, **given}))
    return await served.client.until(name)


async def test_a_broken_stream_is_continued_without_a_gap_or_a_token_twice(server, served):
    server.scripts = [breaks(3), breaks(0), breaks(5)]
    found = await ask(served)
    calls = [len(call.body["token_ids"]) for call in server.calls]
    prompt = list(found.admitted.prompt_token_ids)
    assert found.token_ids == greedy({"token_ids": prompt}, 12) and found.finished.reason == "length"
    assert [length - len(prompt) for length in calls] == [0, 3, 3, 8]


async def test_a_stream_that_ends_without_a_reason_is_continued(server, served):
    server.scripts = [says(event([21])), says(event([22]), b"data: [DONE]\n\n")]
    found = await ask(served)
    assert found.token_ids[:2] == [21, 22] and len(found.token_ids) == 12


GARBAGE = {
    "no event": says(b"<html>no</html>\n"),
    "another type": says(b"{}", kind="application/json"),
    "no JSON": says(b"data: {\n\n"),
    "no chunk": says(b"data: 7\n\n"),
    "foreign tokens": says(event([100_000])),
    "negative tokens": says(event([-1])),
    "binary": says(bytes(range(256)) * 64),
    "a redirect": fails(302),
    "a failure": fails(500),
    "a gateway's failure": says(b"", kind="text/html"),
    "an error event": says(data({"error": {"message": "Internal server error", "code": 500}})),
    "nothing": breaks(0),
}


@pytest.mark.parametrize("script", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_is_asked_for_again_a_few_times_and_then_an_error(server, served, script):
    server.default = script
    found = await ask(served)
    assert len(server.calls) == MAX_FAILURES
    # The worker lives, and so does the engine.
    assert served.health.up
    assert found.finished.reason == "error" and found.finished.error.code == "internal_error"
    assert "vLLM" in found.finished.error.message and found.token_ids == []


async def test_one_request_that_fails_leaves_the_others_alone(server, served):
    async def script(call: Call):
        return await (fails(500) if call.body["cache_salt"] in bad else answer)(call)

    client, key = served.client, served.client.model_key
    bad = {prefix_root(key, "bad").hex()}
    server.default = script
    for number in range(6):
        message = client.message(f"r{number}", "hello", **SAMPLING)
        message.salt = "bad" if number % 2 else "good"
        await client.submit(message)
    found = [await client.until(f"r{number}") for number in range(6)]
    assert [one.finished.reason for one in found] == ["length", "error"] * 3


async def test_a_refusal_is_the_clients_with_vllms_reason_and_field(server, served):
    server.default = fails(400, "logprobs is greater than max allowed: 20", param="logprobs")
    found = await ask(served)
    assert len(server.calls) == 1
    error = found.finished.error
    assert (error.code, error.param) == ("invalid_request_error", "logprobs")
    assert "greater than max allowed: 20" in error.message


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refusal_of_this_worker_is_no_fault_of_the_client(server, served, status):
    server.default = fails(status)
    found = await ask(served)
    assert found.finished.error.code == "internal_error"


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_waited_for(server, served, status):
    server.scripts = [fails(status)] * 5
    found = await ask(served)
    assert len(server.calls) == 6
    assert found.finished.reason == "length" and len(found.token_ids) == 12


async def test_a_slow_server_is_read_as_it_writes(server, served):
    async def script(call: Call):
        response = await call.stream()
        for index, token in enumerate(greedy(call.body, 12)):
            raw = event([token], finish_reason="length" if index == 11 else None)
            for at in range(0, len(raw), 7):
                await response.write(raw[at : at + 7])
                await asyncio.sleep(0)
        return response

    server.scripts = [script]
    found = await ask(served)
    assert len(server.calls) == 1
    assert len(found.token_ids) == 12 and found.finished.reason == "length"
