"""POST /v1/messages and /v1/messages/count_tokens by plain HTTP."""

from __future__ import annotations

import base64
import json
from typing import Any

from support.fakes.fake_workers import MODEL, picture, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.protos import common_pb2, encoder_pb2, pd_pb2

TOOL = {"name": "f", "input_schema": {"type": "object"}}
HELLO = [{"role": "user", "content": "hello"}]
CALLS = 'I look.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 2


def url(cluster: FakeCluster, path: str = "") -> str:
    return f"http://127.0.0.1:{cluster.port}/v1/messages{path}"


async def send(cluster: FakeCluster, path: str = "", **body: Any) -> Any:
    body = {"model": MODEL, "messages": HELLO, **({} if path else {"max_tokens": 3}), **body}
    return await cluster.client._client.post(url(cluster, path), json=body)


async def events_of(cluster: FakeCluster, **body: Any) -> list[dict[str, Any]]:
    reply = await send(cluster, stream=True, **body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Every block's type and text."""
    blocks: list[tuple[str, str]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append((event["content_block"]["type"], ""))
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            (text,) = (value for key, value in event["delta"].items() if key != "type")
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + text)
    return blocks


def image(name: str) -> dict[str, Any]:
    data = base64.b64encode(picture(name)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


async def test_text_and_picture_in_text_out(cluster: FakeCluster) -> None:
    content = [{"type": "text", "text": "see"}, image("p")]
    reply = await send(cluster, messages=[{"role": "user", "content": content}], system="short")
    assert reply.status_code == 200
    message = reply.json()
    assert message["content"] == [{"type": "text", "text": whole_text(3)}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (1, 2, 3)
    sent = json.loads(cluster.pd_workers[0].submits[0].messages)
    assert [turn["role"] for turn in sent] == ["system", "user"]
    assert len(cluster.jobs) == 1


async def test_a_stream_begins_and_ends_its_blocks(cluster: FakeCluster) -> None:
    cluster.pd_workers[0].script = ["Hel", "lo"]
    events = await events_of(cluster, max_tokens=9)
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] == 3
    assert joined(events) == [("text", "Hello")]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 2


async def test_thinking_and_calls_are_blocks_of_their_own(cluster: FakeCluster) -> None:
    worker = cluster.pd_workers[0]
    worker.reasoning = pd_pb2.ReasoningMarkers(start="<think>", end="</think>", begun=True)
    worker.script = ["I ", "see.", "</think>", *CALLS]
    body = {"tools": [TOOL], "max_tokens": 500}
    message = (await send(cluster, **body)).json()
    kinds = ["thinking", "text", "tool_use", "text", "tool_use"]
    assert [block["type"] for block in message["content"]] == kinds
    thinking, said, call, *_, last = message["content"]
    assert (thinking["thinking"], said["text"]) == ("I see.", "I look.")
    assert (call["name"], call["input"], call["id"] != last["id"]) == ("f", {"a": 1}, True)
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    events = await events_of(cluster, **body)
    texts = ["I see.", "I look.", '{"a": 1}', "I look.", '{"a": 1}']
    assert joined(events) == list(zip(kinds, texts, strict=True))
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    begins = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [begin["input"] for begin in begins if begin["type"] == "tool_use"] == [{}, {}]


async def test_a_call_that_is_cut_off_keeps_its_text(cluster: FakeCluster) -> None:
    cluster.pd_workers[0].script = list(CALLS)
    message = (await send(cluster, tools=[TOOL], max_tokens=CALLS.index(" 1}"))).json()
    assert message["content"][1]["input"] == {"INVALID_JSON": '{"a":'}
    assert message["stop_reason"] == "max_tokens"


async def test_the_stop_sequence_is_named(cluster: FakeCluster) -> None:
    worker = cluster.pd_workers[0]
    worker.script, worker.stop_sequence = ["Hello"], "END"
    message = (await send(cluster, stop_sequences=["END"])).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert list(worker.submits[0].sampling.stop) == ["END"]


async def test_tokens_are_counted_without_an_answer(cluster: FakeCluster) -> None:
    reply = await send(cluster, "/count_tokens", system="short", tools=[TOOL])
    assert reply.status_code == 200 and list(reply.json()) == ["input_tokens"]
    assert cluster.pd_workers[0].submits == []


async def test_errors_have_their_own_shape_and_name_the_clients_field(cluster: FakeCluster) -> None:
    broken = common_pb2.Error(code="invalid_request_error", message="cannot be read")
    cluster.encoders[0].failures = [encoder_pb2.JobFailed(error=broken)]
    reply = await send(cluster, messages=[{"role": "user", "content": [image("q")]}])
    body = reply.json()
    assert (reply.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["param"] == "messages[0].content[0].source.data"
    lost = await send(cluster, model="another")
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
    large = await send(cluster, system="x" * (1 << 20))
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    wrong = await cluster.client._client.get(url(cluster))
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    model = f"http://127.0.0.1:{cluster.port}/v1/models/another"
    unknown = await cluster.client._client.get(model, headers={"anthropic-version": "2023-06-01"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert "type" not in (await cluster.client._client.get(model)).json(), "OpenAI's clients name no version"


async def test_a_failure_inside_a_stream_is_an_event(cluster: FakeCluster) -> None:
    cluster.pd_workers[0].fail_with = common_pb2.Error(code="internal_error", message="the worker is ill")
    events = await events_of(cluster)
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "error")
    assert events[-1]["error"]["type"] == "api_error"
    assert events[-1]["error"]["message"] == "the worker is ill"


async def test_a_client_that_goes_in_the_middle_of_a_call_ends_the_request(cluster: FakeCluster) -> None:
    worker = cluster.pd_workers[0]
    worker.script, worker.pace = list(CALLS), 0.01
    body = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "max_tokens": 500, "stream": True}
    async with cluster.client._client.stream("POST", url(cluster), json=body) as reply:
        async for line in reply.aiter_lines():
            if "input_json_delta" in line:
                break
    await until(lambda: not worker.requests)
