"""Requests over gRPC become calls of vLLM, and its tokens the events of the stream."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from support.vllm.scripted_server import event, greedy, hangs, scripted_server
from support.vllm.serving import front_model, fronting
from triptych.pd_worker.vllm import run
from triptych.protos import common_pb2, pd_pb2

SAMPLING = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def expected(prompt, count: int = 12) -> list[int]:
    return greedy({"token_ids": list(prompt)}, count)


async def test_a_text_request_is_answered_token_by_token(server, served):
    client = served.client
    reply = await client.submit(client.message("r1", "hello", **SAMPLING))
    assert reply.status == pd_pb2.SubmitReply.STATUS_QUEUED
    found = await client.until("r1")
    body = server.calls[0].body
    assert found.bodies[0] == "admitted"
    prompt = list(found.admitted.prompt_token_ids)
    assert body["token_ids"] == prompt and "features" not in body
    assert found.token_ids == expected(prompt)
    assert found.text == front_model().tokenizer.decode(found.token_ids)
    assert (found.finished.reason, found.finished.completion_tokens) == ("length", 12)
    assert (found.finished.prompt_tokens, found.finished.cached_tokens) == (len(prompt), 3)


def resume_of(whole, count: int, chars: int = 0) -> pd_pb2.Resume:
    return pd_pb2.Resume(
        prompt_token_ids=whole.admitted.prompt_token_ids,
        placements=whole.admitted.placements,
        output_token_ids=whole.token_ids[:count],
        text_sent_chars=chars,
    )


async def test_a_request_goes_on_where_another_worker_left_it(server, served):
    client = served.client
    await client.submit(client.message("whole", "hello", **SAMPLING))
    whole = await client.until("whole")
    received = whole.text[:3]
    resume = resume_of(whole, 5, len(received))
    await client.submit(client.message("r1", "", attempt=2, resume=resume, **SAMPLING))
    found = await client.until("r1")
    body = server.calls[1].body
    assert body["token_ids"] == [*whole.admitted.prompt_token_ids, *whole.token_ids[:5]]
    assert body["sampling_params"]["max_tokens"] == 7
    assert found.token_ids == whole.token_ids and received + found.text == whole.text
    assert found.finished.completion_tokens == 12


async def test_an_output_with_a_form_is_generated_again_from_the_prompt(server, served):
    form = {"output_format": common_pb2.OutputFormat(regex="[a-z]+"), "max_tokens": 12, "temperature": 0.0}
    client = served.client
    await client.submit(client.message("whole", "hello", **form))
    whole = await client.until("whole")
    await client.submit(client.message("r1", "", attempt=2, resume=resume_of(whole, 5), **form))
    found = await client.until("r1")
    body = server.calls[1].body
    assert body["token_ids"] == list(whole.admitted.prompt_token_ids)
    assert body["sampling_params"]["structured_outputs"] == {"regex": "[a-z]+"}
    assert body["sampling_params"]["max_tokens"] == 12
    assert found.token_ids == whole.token_ids


async def test_a_form_whose_output_comes_otherwise_cannot_be_continued(served):
    form = {"output_format": common_pb2.OutputFormat(regex="[a-z]+"), "max_tokens": 12, "temperature": 0.0}
    client = served.client
    await client.submit(client.message("whole", "hello", **form))
    whole = await client.until("whole")
    resume = resume_of(whole, 5)
    resume.output_token_ids[3] += 1
    await client.submit(client.message("r1", "", attempt=2, resume=resume, **form))
    found = await client.until("r1")
    assert found.finished.error.code == "unavailable" and "output token 3" in found.finished.error.message


async def test_a_penalised_output_that_comes_otherwise_goes_on_with_biases(server, served):
    penalised = {**SAMPLING, "presence_penalty": 0.5}
    client = served.client
    await client.submit(client.message("whole", "hello", **penalised))
    whole = await client.until("whole")
    resume = resume_of(whole, 2)
    resume.output_token_ids[1] += 1
    await client.submit(client.message("r1", "", attempt=2, resume=resume, **penalised))
    found = await client.until("r1")
    bodies = [call.body for call in server.calls[1:]]
    prompt, received = list(whole.admitted.prompt_token_ids), list(resume.output_token_ids)
    assert [body["token_ids"] for body in bodies] == [prompt, prompt + received]
    assert "logit_bias" not in bodies[0]["sampling_params"]
    assert bodies[1]["sampling_params"]["logit_bias"] == {str(token): -0.5 for token in received}
    assert found.token_ids == received + expected(prompt + received, 10)


async def test_logprobs_come_with_their_tokens(server, served):
    async def script(call):
        response = await call.stream()
        top = [{"token_id": 30 + rank, "logprob": -float(rank), "rank": rank} for rank in (3, 1, 2)]
        content = [{"token_id": 33, "logprob": -3.0, "rank": 3, "top_logprobs": top}]
        await response.write(event([33], finish_reason="length", logprobs={"content": content}))
        await response.write(b"data: [DONE]\n\n")
        return response

    server.scripts = [script]
    await served.client.submit(served.client.message("r1", "hello", max_tokens=1, logprobs=2))
    found = await served.client.until("r1")
    assert server.calls[0].body["sampling_params"]["logprobs"] == 3
    (position,) = found.logprobs
    assert (position.chosen.token_id, position.chosen.logprob) == (33, -3.0)
    assert [(one.token_id, one.logprob) for one in position.top] == [(31, -1.0), (32, -2.0)]


async def test_a_cancelled_request_is_ended_in_vllm(server, served):
    server.scripts = [hangs(2)]
    client = served.client
    await client.submit(client.message("r1", "hello", **SAMPLING))
    await client.until("r1", tokens=2)
    await client.stub.Cancel(pd_pb2.CancelRequest(proxy_id="proxy", request_ids=["r1"]))
    await asyncio.wait_for(server.calls[0].gone.wait(), 45)
    await served.settled()


async def test_a_request_whose_time_is_over_ends_with_504_and_in_vllm(server, served, monkeypatch):
    limits: list[asyncio.Timeout] = []

    def timeout_at(when: float) -> asyncio.Timeout:
        limits.append(asyncio.timeout_at(when))
        return limits[-1]

    monkeypatch.setattr(run, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout_at": timeout_at}))
    server.scripts = [hangs(2)]
    client = served.client
    await client.submit(client.message("r1", "hello", timeout=60.0, **SAMPLING))
    await client.until("r1", tokens=2)
    [limit] = limits
    assert 0 < (limit.when() or 0.0) - asyncio.get_running_loop().time() <= 60.0
    limit.reschedule(0.0)
    found = await client.until("r1")
    await asyncio.wait_for(server.calls[0].gone.wait(), 45)
    assert found.finished.error.code == "deadline_exceeded" and len(found.token_ids) == 2


async def test_no_more_requests_are_at_work_in_vllm_than_the_flag_says(store):
    async with scripted_server() as server, fronting(server, store, max_num_seqs=2) as served:
        server.scripts = [hangs(1), hangs(1)]
        client = served.client
        for number in range(4):
            await client.submit(client.message(f"r{number}", "hello", **SAMPLING))
        await client.has("r3", "admitted")
        await client.until("r1", tokens=1)
        assert len(server.calls) == 2
        await client.stub.Cancel(pd_pb2.CancelRequest(proxy_id="proxy", request_ids=["r0", "r1"]))
        found = [await client.until(f"r{number}") for number in (2, 3)]
    assert [len(one.token_ids) for one in found] == [12, 12]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"min_tokens": 2, "output_format": common_pb2.OutputFormat(json_object=True)}, "min_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"output_format": common_pb2.OutputFormat(regex="(")}, "response_format"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name_before_any_call(server, served, sampling, param):
    message = served.client.message("r1", "hello", **{"max_tokens": 12, **sampling})
    reply = await served.client.submit(message)
    assert server.calls == []
    assert reply.status == pd_pb2.SubmitReply.STATUS_REFUSED
    assert (reply.error.code.split("_")[0] in ("invalid", "context"), reply.error.param) == (True, param)


async def test_a_tenant_that_fills_the_server_leaves_another_one_a_place_and_goes_on_with_its_tokens(
    server, store
):
    async with fronting(server, store, max_num_seqs=2) as served:
        client, long, short = served.client, {"max_tokens": 12}, {"max_tokens": 4}
        server.scripts = [hangs(5), hangs(5)]
        for name in ("a1", "a2", "a3"):
            message = client.message(name, "hello", temperature=0.0, ignore_eos=True, **long)
            message.tenant = "a" * 16
            await client.submit(message)
            if name != "a3":  # calls at once may arrive in any order
                half = await client.until(name, tokens=5)
        prompt = half.admitted.prompt_token_ids
        message = client.message("b", "hello", temperature=0.0, ignore_eos=True, **short)
        message.tenant = "b" * 16
        await client.submit(message)
        assert (await client.until("b")).token_ids == expected(prompt, 4)
        assert server.calls[1].gone.is_set() and not server.calls[0].gone.is_set()
        assert served.metrics.tenant_preemptions._value.get() == 1
        assert (await client.until("a2")).token_ids == expected(prompt)
        assert (await client.until("a3")).token_ids == expected(prompt)
