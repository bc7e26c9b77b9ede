"""A model's reasoning, as the openai package and gRPC clients see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.channels import connected_channel
from support.fakes.fake_workers import MODEL
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.protos import pd_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.store.embedding_store import EmbeddingStore

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
    async with connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
        events = [event async for event in stub.Chat(proxy_pb2.ChatRequest(messages=[message]), timeout=20.0)]
    assert "".join(event.reasoning for event in events) == "I see."
    assert "".join(event.text for event in events) == "Red."
