"""Several choices, log-probabilities and tools, as the openai package sees them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import APIStatusError

from support.fakes.fake_workers import choice_text, picture, user
from support.fakes.proxy_fakes import FakeCluster
from support.hostile.malformed import chosen, tool
from support.waiting import until
from triptych.protos import common_pb2
from triptych.store.embedding_store import EmbeddingStore

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [tool("look", at=str), tool("now")]
CALL = [
    "Let me ",
    "see. ",
    "<tool",
    '_call>\n{"name": "look",',
    ' "arguments": {"at": "sky"}}',
    "\n</tool_call>",
]


def text_of(choice: int, count: int = 8) -> str:
    return "".join(choice_text(choice, index) for index in range(count))


async def streamed(cluster: FakeCluster, messages: list[dict[str, Any]], **extra: Any) -> list[Any]:
    chunks = await cluster.client.chat.completions.create(
        model="demo", messages=messages, stream=True, max_tokens=extra.pop("max_tokens", 8), **extra
    )
    return [chunk async for chunk in chunks]


async def test_n_choices_come_in_one_reply_and_share_one_picture(store: EmbeddingStore) -> None:
    async with FakeCluster(store, pd_workers=2) as cluster:
        reply = await cluster.ask(user("x", picture("p")), n=3, seed=5)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert [choice.message.content for choice in reply.choices] == [text_of(0), text_of(1), text_of(2)]
        assert {choice.finish_reason for choice in reply.choices} == {"length"}
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 24)
        assert reply.usage.prompt_tokens_details.cached_tokens == 2
        assert cluster.encoders[0].runs == 1
        submits = [submit for worker in cluster.pd_workers for submit in worker.submits]
        assert sorted(submit.sampling.choice for submit in submits) == [0, 1, 2]
        assert {submit.sampling.seed for submit in submits} == {5}
        await cluster.at_rest()


async def test_n_choices_are_streamed_beside_each_other_with_one_usage(cluster: FakeCluster) -> None:
    chunks = await streamed(cluster, HELLO, n=2, stream_options={"include_usage": True})
    for index in range(2):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == text_of(index)
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["length"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [16]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_client_that_goes_ends_all_its_choices(cluster: FakeCluster) -> None:
    worker = cluster.pd_workers[0]
    worker.pause_at = 2
    asking = asyncio.create_task(cluster.ask(HELLO, n=3))
    await until(lambda: len(worker.requests) == 3)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: len(worker.cancels) == 3)


async def test_one_choice_that_fails_ends_the_others_and_the_request(cluster: FakeCluster) -> None:
    worker = cluster.pd_workers[0]
    worker.pause_at = 2
    worker.fail_choice = 1
    worker.fail_with = common_pb2.Error(code="invalid_request_error", message="seed: no", param="seed")
    with pytest.raises(APIStatusError) as caught:
        await cluster.ask(HELLO, n=3)
    assert (caught.value.status_code, caught.value.body["param"]) == (400, "seed")  # type: ignore[index]
    await until(lambda: len(set(worker.cancels)) == 3)


async def test_choices_resume_each_on_its_own(store: EmbeddingStore) -> None:
    async with FakeCluster(store, pd_workers=2) as cluster:
        for worker in cluster.pd_workers:
            worker.pause_at = 3
        asking = asyncio.create_task(cluster.ask(HELLO, n=2, logprobs=True, top_logprobs=1))
        await until(lambda: cluster.received == 6)
        dead, alive = sorted(cluster.pd_workers, key=lambda worker: len(worker.requests), reverse=True)
        alive.pause_at = None
        alive.gate.set()
        await dead.kill()
        reply = await asking
        for choice in reply.choices:
            assert choice.message.content == text_of(choice.index)
            shown = [token.token for token in choice.logprobs.content]
            assert shown == [choice_text(choice.index, index) for index in range(8)]
        assert any(submit.attempt == 2 for submit in alive.submits)


async def test_tools_go_to_the_template_and_calls_come_back(cluster: FakeCluster) -> None:
    worker = cluster.pd_workers[0]
    worker.script = CALL
    reply = await cluster.ask(HELLO, tools=TOOLS)
    (choice,) = reply.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "look",
        {"at": "sky"},
    )
    assert json.loads(worker.submits[0].template.tools) == TOOLS
    assert not worker.submits[0].sampling.HasField("output_format")


async def test_streamed_calls_have_openais_deltas(cluster: FakeCluster) -> None:
    cut = [*CALL[:4], ' "arguments": {"at": "s', 'ky"}}', CALL[5]]
    cluster.pd_workers[0].script = [*cut, "\n", *cut[2:]]
    chunks = await streamed(cluster, HELLO, tools=TOOLS, max_tokens=99)
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in choices) == "Let me see."
    deltas = [delta for choice in choices for delta in choice.delta.tool_calls or ()]
    assert [delta.index for delta in deltas] == [0, 0, 0, 1, 1, 1]
    assert [delta.function.name for delta in deltas] == ["look", None, None] * 2
    assert [delta.function.arguments for delta in deltas] == ["", '{"at": "s', 'ky"}'] * 2
    assert len({delta.id for delta in deltas if delta.id}) == 2
    assert choices[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "output"),
    [
        ("required", '[{"name": "look", "arguments": {"at": "sky"}}]'),
        (chosen("look"), '{"name": "look", "arguments": {"at": "sky"}}'),
    ],
)
async def test_a_forced_call_is_held_to_its_form(cluster: FakeCluster, choice: Any, output: str) -> None:
    cluster.pd_workers[0].script = [output[:9], output[9:]]
    reply = await cluster.ask(HELLO, tools=TOOLS, tool_choice=choice)
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, reply.choices[0].message.content) == ("look", None)
    assert reply.choices[0].finish_reason == "tool_calls"
    schema = json.loads(cluster.pd_workers[0].submits[0].sampling.output_format.json_schema)
    assert schema["type"] == ("array" if choice == "required" else "object")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"extra_body": {"guided_regex": "a{9}"}}, "guided_regex"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_a_form_that_the_worker_refuses_is_named_as_the_client_named_it(cluster, extra, param):
    refusal = common_pb2.Error(
        code="invalid_request_error", message="response_format: too much", param="response_format"
    )
    cluster.pd_workers[0].refusals.append(refusal)
    with pytest.raises(APIStatusError) as caught:
        await cluster.ask(HELLO, **extra)
    assert caught.value.body["param"] == param  # type: ignore[index]
    assert f"{param}: too much" in caught.value.message


async def test_sampling_and_template_options_reach_the_worker(cluster: FakeCluster) -> None:
    await cluster.ask(
        [*HELLO, {"role": "assistant", "content": "I"}],
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100},
        response_format={"type": "json_object"},
        extra_body={
            "repetition_penalty": 1.5,
            "min_p": 0.25,
            "chat_template_kwargs": {"enable_thinking": False},
            "continue_final_message": True,
        },
    )
    (submit,) = cluster.pd_workers[0].submits
    sampling = submit.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.min_p) == (1.5, 0.25)
    assert dict(sampling.logit_bias) == {7: -100.0}
    assert sampling.output_format.json_object
    assert json.loads(submit.template.variables) == {"enable_thinking": False}
    assert (submit.template.no_generation_prompt, submit.template.continue_final_message) == (True, True)


async def test_a_workers_tool_format_decides_how_calls_are_read(cluster: FakeCluster) -> None:
    cluster.pd_workers[0].tool_format = "qwen3_coder"
    cluster.pd_workers[0].script = [
        *("<tool", "_call>\n<function=look>\n", "<parameter=at>\n12\n</parameter>\n"),
        "</function>\n</tool_call>",
    ]
    (choice,) = (await cluster.ask(HELLO, tools=TOOLS, max_tokens=99)).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "12"})
