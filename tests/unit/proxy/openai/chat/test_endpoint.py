from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from triptych.base.config import ProxyConfig
from triptych.base.delta import Delta
from triptych.base.errors import Unavailable
from triptych.base.metrics import ProxyMetrics
from triptych.base.types import FinishReason, Usage
from triptych.protos.pd_pb2 import Admitted
from triptych.proxy.call.chat import Done, Output, Timings
from triptych.proxy.openai.chat.endpoint import ApiLimits, ChatEndpoint, ChatStream
from triptych.proxy.openai.chat.request import ChatReplyOptions, parse_body
from triptych.proxy.parsing.parsers import Parsers
from triptych.proxy.quotas.table import QuotaTable, quota_specs
from triptych.proxy.requests.output_queue import OutputQueue

DONE = Done(FinishReason.STOP, Usage(3, 2), Timings())
BODY = b'{"messages": [{"role": "user", "content": "x"}], "stream": true%s}'


def options(extra: bytes = b"") -> ChatReplyOptions:
    return parse_body(BODY % extra, "id", max_images=1, timeout=9.0)[1]


def chunks(data: bytes) -> list[Any]:
    events = data.split(b"\n\n")
    assert events.pop() == b""
    return [
        msgspec.json.decode(event.removeprefix(b"data: ")) for event in events if event != b"data: [DONE]"
    ]


def test_a_batch_of_tokens_becomes_one_chunk_each_that_differ_in_the_text_alone() -> None:
    stream = ChatStream("id", "m", options())
    stream.render([Admitted(prompt_token_ids=(1, 2)), Delta("a", [1])])
    first, second = chunks(stream.render([Delta('"\n', [2]), Delta("", [3]), Delta("ñ", [4])]))
    assert first["choices"][0]["delta"] == {"content": '"\n'}
    assert second["choices"][0]["delta"] == {"content": "ñ"}
    first["choices"][0]["delta"] = second["choices"][0]["delta"]
    assert first == second


def test_tokens_before_the_end_in_one_batch_come_before_it() -> None:
    stream = ChatStream("id", "m", options(b', "stream_options": {"include_usage": true}'))
    shown = chunks(stream.render([Admitted(prompt_token_ids=(1,)), Delta("a", [1]), Delta("b", [2]), DONE]))
    assert [chunk["choices"][0]["delta"].get("content") for chunk in shown[:-1]] == ["", "a", "b", None]
    assert [chunk["usage"] for chunk in shown[:-1]] == [None] * 4
    assert shown[-1]["usage"]["completion_tokens"] == 2


class Queued:
    """A dispatcher whose output a test puts into the queue."""

    def __init__(self) -> None:
        self.quotas = QuotaTable(quota_specs(ProxyConfig()))
        self.parsers = Parsers(self.quotas["parser"], self.quotas["parser-processes"])
        self.output = OutputQueue()
        self.metrics = ProxyMetrics()
        self.closed = False

    def resolve_model(self, name: str) -> str:
        return "m"

    async def chat(self, call: object, context: object) -> AsyncIterator[list[Output]]:
        try:
            while True:
                outputs = await self.output.drain()
                yield outputs
                if outputs[-1] is DONE:
                    return
        finally:
            self.closed = True


class Client:
    """One client of a streamed chat: what it has been sent, and the answer's task. `fail_at`: the part that
    meets a closed connection. `extra`: further fields of its body."""

    def __init__(self, dispatcher: Queued, fail_at: int = 1000, extra: bytes = b"") -> None:
        self.parts: list[bytes] = []
        self._fail_at = fail_at
        self._body = [{"type": "http.request", "body": BODY % extra}]
        endpoint = ChatEndpoint(dispatcher, None, ApiLimits())  # type: ignore[arg-type]
        scope = {"type": "http", "method": "POST", "headers": []}
        self.answer = asyncio.create_task(endpoint(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body:
            return self._body.pop()
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if len(self.parts) == self._fail_at:
                raise ConnectionResetError
            self.parts.append(message["body"])


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_token_leaves_without_waiting_for_a_timer_or_for_another_token() -> None:
    dispatcher = Queued()
    client = Client(dispatcher)
    await turns()
    dispatcher.output.put(Delta("a", [1]))
    await turns(2)
    assert len(client.parts) == 1
    dispatcher.output.put(Delta("b", [2]))
    await turns(2)
    assert len(client.parts) == 2  # only further tokens of a burst are gathered
    client.answer.cancel()


async def test_tokens_that_come_together_are_one_write_with_a_chunk_each() -> None:
    dispatcher = Queued()
    client = Client(dispatcher)
    await turns()
    for text in "abc":
        dispatcher.output.put(Delta(text, [1]))
    dispatcher.output.put(DONE)
    async with asyncio.timeout(30):
        await client.answer
    (part,) = client.parts
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks(part)] == ["", *"abc", None]


async def test_a_client_that_closes_amid_its_stream_ends_its_request() -> None:
    dispatcher = Queued()
    client = Client(dispatcher, fail_at=1)
    await turns()
    dispatcher.output.put(Delta("a", [1]))
    await turns()
    dispatcher.output.put(Delta("b", [2]))
    async with asyncio.timeout(30):
        await client.answer
    assert dispatcher.closed
    assert len(client.parts) == 1


async def test_an_error_amid_a_stream_is_an_event_behind_whole_chunks() -> None:
    dispatcher = Queued()
    client = Client(dispatcher)
    await turns()
    dispatcher.output.put(Delta("a", [1]))
    dispatcher.output.put(Delta("b", [2]))
    dispatcher.output.fail(Unavailable("the worker has gone"))
    async with asyncio.timeout(30):
        await client.answer
    sent = b"".join(client.parts)
    assert sent.endswith(b"data: [DONE]\n\n")
    *told, error = chunks(sent)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in told] == ["", "a", "b"]
    assert error["error"]["message"] == "the worker has gone"
