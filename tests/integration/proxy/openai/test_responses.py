"""The responses API, and reasoning in every API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import BadRequestError

from support.fakes.fake_workers import MODEL, data_url, picture, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.base.rpc.channels import make_channel
from triptych.protos import common_pb2, encoder_pb2, pd_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.store.embedding_store import EmbeddingStore

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


def _picture_input() -> list[dict[str, Any]]:
    content = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": data_url(picture("p")), "detail": "auto"},
    ]
    return [{"role": "user", "content": content}]


async def _respond(cluster: FakeCluster, **options: Any) -> Any:
    return await cluster.client.responses.create(model=MODEL, **{"max_output_tokens": 3, **options})


async def _events(cluster: FakeCluster, **options: Any) -> list[Any]:
    events = [event async for event in await _respond(cluster, stream=True, **options)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


async def test_text_and_picture_in_text_out(cluster: FakeCluster) -> None:
    reply = await _respond(cluster, input=_picture_input(), instructions="short", metadata={"a": "b"})
    assert reply.output_text == whole_text(3)
    assert (reply.object, reply.status, reply.model) == ("response", "incomplete", MODEL)
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert (reply.instructions, reply.metadata, reply.store) == ("short", {"a": "b"}, False)
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (3, 3, 6)
    assert reply.usage.input_tokens_details.cached_tokens == 2
    sent = json.loads(cluster.pd_workers[0].submits[0].messages)
    assert [message["role"] for message in sent] == ["system", "user"]
    assert len(cluster.jobs) == 1


async def test_a_stream_tells_the_response_step_by_step(cluster: FakeCluster) -> None:
    cluster.pd_workers[0].script = ["Hel", "lo"]
    events = await _events(cluster, input="x", max_output_tokens=9)
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0].response.status == "in_progress"
    assert "".join(event.delta for event in events[4:6]) == events[6].text == "Hello"
    assert len({event.item_id for event in events[3:8]}) == 1
    assert events[-1].response.output_text == "Hello"
    assert events[-1].response.usage.output_tokens == 2


async def test_calls_become_items_between_the_texts(cluster: FakeCluster) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    cluster.pd_workers[0].script = ["I ", "look.", *call]
    reply = await _respond(cluster, input="x", tools=[TOOL], max_output_tokens=200)
    text, called = reply.output
    assert (text.type, text.content[0].text, called.type) == ("message", "I look.", "function_call")
    assert (called.name, json.loads(called.arguments)) == ("f", {"a": 1})
    assert called.call_id.startswith("call_")
    events = await _events(cluster, input="x", tools=[TOOL], max_output_tokens=200)
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert deltas == ["{", '"', "a", '"', ":", " ", "1}"], "every piece of the text that is certain"
    first = kinds.index("response.function_call_arguments.delta")
    assert kinds[first - 1] == "response.output_item.added"
    assert kinds[first + len(deltas) :] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert {event.item_id for event in events[first : first + len(deltas) + 1]} == {
        events[-1].response.output[1].id
    }
    assert (events[-1].response.output[1].name, events[-1].response.output[1].arguments) == ("f", '{"a": 1}')


async def test_a_broken_picture_is_named_by_the_clients_field(cluster: FakeCluster) -> None:
    broken = common_pb2.Error(code="invalid_request_error", message="cannot be read")
    cluster.encoders[0].failures = [encoder_pb2.JobFailed(error=broken)]
    with pytest.raises(BadRequestError) as refused:
        await _respond(cluster, input=_picture_input())
    assert refused.value.param == "input[0].content[1].image_url"


async def test_a_failure_inside_a_stream_fails_the_response(cluster: FakeCluster) -> None:
    worker = cluster.pd_workers[0]
    worker.fail_with = common_pb2.Error(code="internal_error", message="the worker is ill")
    events = await _events(cluster, input="x")
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2].message == "the worker is ill"
    assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "server_error")


HELLO = [{"role": "user", "content": "hello"}]
SCRIPT = ["I ", "see.\n", "</thi", "nk>", "\n\n", "Red", "."]


@pytest.fixture
async def cluster(store: EmbeddingStore) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(store, pd_workers=2) as cluster:
        for worker in cluster.pd_workers:
            worker.reasoning = pd_pb2.ReasoningMarkers(start="<think>", end="</think>", begun=True)
            worker.script = SCRIPT
        yield cluster


def submits(cluster: FakeCluster) -> list[pd_pb2.SubmitRequest]:
    return [submit for worker in cluster.pd_workers for submit in worker.submits]


async def test_a_reply_has_the_reasoning_beside_the_content(cluster: FakeCluster) -> None:
    reply = await cluster.ask(HELLO, n=2)
    for choice in reply.choices:
        assert choice.message.content == "Red."
        assert choice.message.reasoning_content == choice.message.reasoning == "I see."
    assert reply.usage.completion_tokens_details.reasoning_tokens == 2 * 3


async def test_a_stream_has_the_reasoning_first(cluster: FakeCluster) -> None:
    chunks = await cluster.client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    deltas, usage = [], None
    async for chunk in chunks:
        usage = chunk.usage or usage
        deltas += [choice.delta for choice in chunk.choices]
    pieces = [getattr(delta, "reasoning_content", None) or delta.content for delta in deltas]
    assert [piece for piece in pieces if piece] == ["I ", "see.", "Red", "."]
    assert [delta.content for delta in deltas if delta.content] == ["Red", "."]
    assert usage.completion_tokens_details.reasoning_tokens == 3


async def test_reasoning_that_is_not_wanted_is_left_out(cluster: FakeCluster) -> None:
    reply = await cluster.ask(HELLO, extra_body={"include_reasoning": False})
    assert reply.choices[0].message.content == "Red."
    assert not hasattr(reply.choices[0].message, "reasoning_content")


async def test_an_output_that_ends_in_the_reasoning_has_no_content(cluster: FakeCluster) -> None:
    reply = await cluster.ask(HELLO, max_tokens=2)
    (choice,) = reply.choices
    assert (choice.message.content, choice.message.reasoning_content) == (None, "I see.\n")
    assert choice.finish_reason == "length"


async def test_a_worker_lost_in_mid_thought_costs_no_letter(cluster: FakeCluster) -> None:
    for worker in cluster.pd_workers:
        worker.pause_at = 3
    asking = asyncio.create_task(cluster.ask(HELLO))
    await until(lambda: cluster.received == 3)
    dead, alive = sorted(cluster.pd_workers, key=lambda worker: len(worker.requests), reverse=True)
    alive.pause_at = None
    alive.gate.set()
    await dead.kill()
    message = (await asking).choices[0].message
    assert (message.reasoning_content, message.content) == ("I see.", "Red.")
    assert alive.submits[0].attempt == 2


@pytest.mark.parametrize(
    ("extra", "variables"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, None),
        ({"chat_template_kwargs": {"thinking": False}}, {"thinking": False}),
    ],
)
async def test_the_effort_goes_to_the_template(cluster, extra, variables):
    await cluster.ask(HELLO, extra_body={**extra, "thinking_token_budget": 5})
    (submit,) = submits(cluster)
    expected = variables or {"reasoning_effort": "none", "enable_thinking": True, "thinking": False}
    assert json.loads(submit.template.variables) == expected
    assert submit.sampling.thinking_token_budget == 5


async def test_the_reasoning_of_earlier_answers_goes_to_the_template(cluster: FakeCluster) -> None:
    for name in ("reasoning_content", "reasoning"):
        answer = {"role": "assistant", "content": "Red.", name: "I see."}
        await cluster.ask([*HELLO, answer, *HELLO])
    for submit in submits(cluster):
        assert json.loads(submit.messages)[1]["reasoning_content"] == "I see."


async def test_the_responses_api_has_an_item_of_its_own_for_it(cluster: FakeCluster) -> None:
    create = cluster.client.responses.create
    reply = await create(model=MODEL, input="x", reasoning={"effort": "low"})
    thought, message = reply.output
    assert (thought.type, thought.content[0].text, message.content[0].text) == ("reasoning", "I see.", "Red.")
    assert reply.usage.output_tokens_details.reasoning_tokens == 3
    events = [event async for event in await create(model=MODEL, input="x", stream=True)]
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", "content_part.done"),
        *("output_item.done", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "completed"),
    ]
    assert events[-1].response.output[0].content[0].text == "I see."
    items = [item.model_dump() for item in reply.output]
    await create(model=MODEL, input=[*HELLO, *items, *HELLO])
    sent = max((json.loads(submit.messages) for submit in submits(cluster)), key=len)
    assert [message["role"] for message in sent] == ["user", "assistant", "user"]
    assert (sent[1]["reasoning_content"], sent[1]["content"]) == ("I see.", "Red.")


async def test_grpc_has_it_apart_from_the_text(cluster: FakeCluster) -> None:
    message = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="hello")])
    async with make_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
        events = [event async for event in stub.Chat(proxy_pb2.ChatRequest(messages=[message]), timeout=20.0)]
    assert "".join(event.reasoning for event in events) == "I see."
    assert "".join(event.text for event in events) == "Red."
