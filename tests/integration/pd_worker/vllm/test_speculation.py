"""Frames of several tokens, as vLLM sends them where it decodes speculatively."""

from __future__ import annotations

import pytest
from aiohttp import web

from support.vllm.scripted_server import Call, data, event, greedy
from support.vllm.serving import fronting
from triptych.protos import pd_pb2

SAMPLING = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


async def frames(call: Call) -> web.StreamResponse:
    """The answer in frames of one, four and seven tokens, the end with the last one."""
    response = await call.stream()
    tokens, begin = greedy(call.body, call.max_tokens), 0
    for size in (1, 4, 7):
        part = tokens[begin : begin + size]
        begin += size
        await response.write(event(part, finish_reason="length" if begin >= len(tokens) else None))
    await response.write(data({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}))
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.fixture
async def drafting(server, store):
    server.speculates, server.default = True, frames
    async with fronting(server, store) as served:
        yield served


async def test_every_token_of_a_frame_comes_once_and_in_order(server, drafting) -> None:
    client = drafting.client
    await client.submit(client.message("r1", "hello", **SAMPLING))
    found = await client.until("r1")
    assert found.token_ids == greedy({"token_ids": list(found.admitted.prompt_token_ids)}, 12)
    assert (found.finished.reason, found.finished.completion_tokens) == ("length", 12)


async def test_what_is_behind_a_stop_in_its_frame_is_dropped(server, drafting) -> None:
    client = drafting.client
    await client.submit(client.message("whole", "hello", **SAMPLING))
    tokens = (await client.until("whole")).token_ids
    stop = next(token for at, token in enumerate(tokens) if at in (2, 3) and token not in tokens[:at])
    await client.submit(client.message("r1", "hello", **SAMPLING, stop_token_ids=[stop]))
    found = await client.until("r1")
    assert found.finished.reason == "stop"
    assert found.token_ids == tokens[: tokens.index(stop) + 1]


async def test_a_request_goes_on_in_the_middle_of_a_frame(server, drafting) -> None:
    client = drafting.client
    await client.submit(client.message("whole", "hello", **SAMPLING))
    whole = await client.until("whole")
    resume = pd_pb2.Resume(
        prompt_token_ids=whole.admitted.prompt_token_ids, output_token_ids=whole.token_ids[:3]
    )
    await client.submit(client.message("r1", "", attempt=2, resume=resume, **SAMPLING))
    assert (await client.until("r1")).token_ids == whole.token_ids


async def test_a_frequency_penalty_goes_on_from_the_prompt(server, drafting) -> None:
    client = drafting.client
    await client.submit(client.message("whole", "hello", **SAMPLING))
    whole = await client.until("whole")
    prompt = whole.admitted.prompt_token_ids
    resume = pd_pb2.Resume(prompt_token_ids=prompt, output_token_ids=whole.token_ids[:3])
    message = client.message("r1", "", attempt=2, resume=resume, frequency_penalty=0.5, **SAMPLING)
    await client.submit(message)
    assert (await client.until("r1")).token_ids == whole.token_ids
    body = server.calls[-1].body
    assert body["token_ids"] == list(prompt) and "logit_bias" not in body["sampling_params"]


async def test_a_bias_is_refused_by_name_before_vllm_is_asked(server, drafting) -> None:
    client = drafting.client
    reply = await client.submit(client.message("r1", "hello", **SAMPLING, logit_bias={5: 1.0}))
    assert (reply.error.code, reply.error.param) == ("invalid_request_error", "logit_bias")
    assert not server.calls
