"""POST /v1/responses with the openai package as its client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError

from support.fakes.fake_workers import MODEL, data_url, picture, whole_text
from support.fakes.proxy_fakes import FakeCluster
from triptych.protos import common_pb2, encoder_pb2

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
