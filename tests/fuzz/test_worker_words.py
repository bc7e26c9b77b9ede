"""What a worker or a model could say to the proxy: a reply or an error, and the next request is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

from support.fakes.fake_workers import MODEL, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.hostile.fuzzing import Fuzzer, random_json, random_message, randoms
from triptych.apps.client.wire import EventLines
from triptych.base.errors import RequestError
from triptych.base.types import SamplingParams
from triptych.protos import pd_pb2
from triptych.proxy.call.chat import ChatCall, ChatMessage
from triptych.proxy.quotas.call_context import NOBODY
from triptych.store.embedding_store import EmbeddingStore

KNOWN = {
    "attempt": [1, 1, 2],
    "position": [0, 1, 2, 8],
    "reason": ["stop", "length", "error", "abort", "no reason"],
    "code": ["unavailable", "overloaded", "invalid_request_error", "", "x"],
    "mm_hash": ["a" * 64, "x"],
}


def events_of(rng: random.Random) -> list[pd_pb2.RequestEvent]:
    return [random_message(pd_pb2.RequestEvent, rng, KNOWN) for _ in range(rng.randrange(1, 5))]


async def tell(cluster: FakeCluster, events: list[pd_pb2.RequestEvent]) -> None:
    """A request under way hears these events, then its client leaves."""
    pd = cluster.pd_workers[0]
    before = len(pd.submits)
    call = ChatCall("fuzzed", MODEL, (ChatMessage("user", "x"),), SamplingParams(max_tokens=3), 5.0)

    async def listen() -> None:
        async for outputs in cluster.dispatcher.chat(call, NOBODY):
            assert outputs

    listening = asyncio.create_task(listen())
    async with asyncio.timeout(10):
        while len(pd.submits) == before and not listening.done():
            await asyncio.sleep(0.001)
    if len(pd.submits) > before:
        for event in events:
            event.request_id = pd.submits[-1].request_id
            pd.streams["proxy-test"].put_nowait(event)
    await asyncio.sleep(0.004)
    listening.cancel()
    with contextlib.suppress(RequestError, asyncio.CancelledError):
        await listening


def test_any_events_of_a_pd_worker_end_at_most_their_request(store_url, fuzzer, caplog):
    with asyncio.Runner() as runner:
        store = runner.run(EmbeddingStore.connect(store_url))
        runner.run(store.control.execute("FLUSHALL"))
        opened = FakeCluster(store)
        cluster = runner.run(opened.__aenter__())
        cluster.pd_workers[0].gate.clear()
        fuzzer.run("PD events", randoms().map(events_of), lambda some: runner.run(tell(cluster, some)), 60)
        cluster.pd_workers[0].gate.set()
        assert runner.run(asyncio.wait_for(cluster.stream(user("next")), 20)) == whole_text(8)
        runner.run(cluster.at_rest())
        assert not [record for record in caplog.records if record.exc_info], caplog.text
        runner.run(opened.__aexit__(None, None, None))
        runner.run(store.close())


PIECES = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', "\n", "x", '"', "\\", "<"]
PIECES += ['{"name":', "}", "{", "[", "]", "null", '{"name": "g"}', "é😀", "<tool", "call>"]
PIECES += ['{"name": "", "arguments": []}']


def line_of(rng: random.Random) -> str:
    value = random_json(rng)
    if rng.random() < 0.3:
        value = {"error": value, "choices": random_json(rng)}
    line = "data: " + json.dumps(value)
    cut = rng.randrange(len(line) + 1) if rng.random() < 0.3 else len(line)
    return rng.choice(
        (line[:cut], line, "data: [DONE]", "data:" + "[" * 100_000, ": ping", "event: x", "data:")
    )


def test_any_line_of_a_stream_is_an_event_or_an_error_of_ours(fuzzer: Fuzzer) -> None:
    def check(line: str) -> None:
        try:
            events = list(EventLines().feed(line.encode() + b"\n"))
        except RequestError as error:
            assert error.message
        else:
            assert all(isinstance(event, dict) for event in events)

    fuzzer.run("lines of a stream", randoms().map(line_of), check, 100)
