"""What gRPC clients get beside text: choices, log-probabilities and tool calls."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from support.fakes.proxy_fakes import FakeCluster
from support.hostile.malformed import tool
from triptych.base.rpc.channels import make_channel
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc

HELLO = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="hello")])
CALL = ["I look. ", '<tool_call>{"name": "look", ', '"arguments": {}}</tool_call>']
Sampling = common_pb2.SamplingParams


async def chat(cluster: FakeCluster, **fields: Any) -> list[proxy_pb2.ChatEvent]:
    request = proxy_pb2.ChatRequest(**{"messages": [HELLO], "sampling": Sampling(max_tokens=8), **fields})
    async with make_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
        return [event async for event in stub.Chat(request, timeout=20.0)]


async def test_calls_are_found_and_answered(cluster: FakeCluster) -> None:
    worker = cluster.pd_workers[0]
    worker.script = CALL
    tools = proxy_pb2.ChatTools(tools=json.dumps([tool("look")]))
    events = await chat(cluster, tools=tools)
    assert "".join(event.text for event in events) == "I look."
    (call,) = [call for event in events for call in event.tool_calls]
    assert (call.index, call.name, call.arguments) == (0, "look", "{}")
    assert events[-1].finish.reason == "tool_calls"
    made = proxy_pb2.ChatMessage(role="assistant", tool_calls=[call])
    answer = proxy_pb2.ChatMessage(role="tool", tool_call_id=call.id, parts=[proxy_pb2.ChatPart(text="blue")])
    await chat(cluster, tools=tools, messages=[HELLO, made, answer])
    sent = json.loads(worker.submits[-1].messages)
    assert sent[1]["tool_calls"] == [
        {"id": call.id, "type": "function", "function": {"name": "look", "arguments": {}}}
    ]
    assert sent[2] == {"role": "tool", "content": "blue", "tool_call_id": call.id}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 17}, "n must be"),
        ({"sampling": Sampling(choice=1)}, "sampling.choice"),
        ({"sampling": Sampling(logprobs=21)}, "logprobs"),
        ({"sampling": Sampling(bad_words=[" "])}, "bad_words"),
        ({"sampling": Sampling(logit_bias={3: 101})}, "logit_bias"),
        ({"sampling": Sampling(output_format={"json_schema": "{"})}, "output_format.json_schema"),
        ({"sampling": Sampling(output_format={"choices": {}})}, "output_format.choices"),
        ({"tools": proxy_pb2.ChatTools(tools="{}")}, "tools"),
        ({"tools": proxy_pb2.ChatTools(choice="required")}, "tool_choice"),
        ({"tools": proxy_pb2.ChatTools(tools=json.dumps([tool("f")]), function="g")}, "tool_choice"),
        ({"chat_template_kwargs": "[]"}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [proxy_pb2.ChatMessage(role="robot")]}, "messages[0].role"),
        (
            {
                "messages": [
                    proxy_pb2.ChatMessage(
                        role="assistant", tool_calls=[proxy_pb2.ToolCall(name="f", arguments="[]")]
                    )
                ]
            },
            "messages[0].tool_calls[0].arguments",
        ),
    ],
)
async def test_what_cannot_be_is_refused_by_name(cluster, fields, named):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await chat(cluster, **fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in (caught.value.details() or "")
    assert not cluster.pd_workers[0].submits
