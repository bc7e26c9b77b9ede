"""A proxy's link after a break: more requests, and more to be sent again, than one message holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc import aio
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from support.waiting import until
from triptych.base.delta import Delta
from triptych.base.rpc import channels as rpc
from triptych.base.rpc.channels import make_channel, make_server
from triptych.pd_worker import server
from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.pd_worker.events.streams import MESSAGE_BYTES, EventStreams
from triptych.pd_worker.events.token_texts import TokenTexts
from triptych.pd_worker.frontend.wire import MAX_KEYS, MAX_REQUESTS
from triptych.pd_worker.server import PDServicer
from triptych.pd_worker.turn_pool import TurnPool
from triptych.protos import pd_pb2, pd_pb2_grpc
from triptych.protos.error_replies import ErrorReplies
from triptych.protos.pd_pb2 import Admitted, Finished, RequestEvent
from triptych.proxy.events import WorkerEvent
from triptych.proxy.pd import link as pd_client
from triptych.proxy.pd import wire
from triptych.proxy.pd.link import PDLink
from triptych.proxy.ports import ProcessEnd

PROXY = "proxy-test"
#: What a call may name, and a message hold, in these tests: a tenth of what it is, to be quick.
CALL_REQUESTS, MESSAGE_LIMIT = 2000, 8 << 20


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MESSAGE_BYTES < MESSAGE_LIMIT < rpc.MAX_MESSAGE_BYTES
    assert pd_client.NAMED_AT_ONCE < MAX_REQUESTS
    assert pd_client.KEYS_AT_ONCE < MAX_KEYS
    sizes = {"grpc.max_receive_message_length", "grpc.max_send_message_length"}
    options = [(name, MESSAGE_LIMIT if name in sizes else value) for name, value in rpc._OPTIONS]
    monkeypatch.setattr(rpc, "_OPTIONS", options)
    monkeypatch.setattr(server, "MAX_REQUESTS", CALL_REQUESTS)
    monkeypatch.setattr(pd_client, "NAMED_AT_ONCE", CALL_REQUESTS // 4)
    monkeypatch.setattr(pd_client, "deliver", _hear)


def _hear(step: pd_pb2.StepEvents, heard: Heard) -> None:
    wire._deliver_tokens(step.tokens, heard)  # type: ignore[arg-type]
    heard.events.extend(step.events)


@dataclass
class Heard:
    """Owner of the link: keeps what it reports, its events as they come."""

    events: list[pd_pb2.RequestEvent] = field(default_factory=list)
    #: What came in lists.
    listed: list[tuple[str, int, list[int], str]] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    streams: int = 0
    ends: list[ProcessEnd] = field(default_factory=list)

    def deliver(self, request_id: str, event: WorkerEvent) -> None:
        self.losses.append(request_id)

    def tokens(self, request_id: str, attempt: int, position: int, ids: list[int], text: str) -> None:
        self.listed.append((request_id, position, ids, text))

    def attached(self, incarnation: str) -> None:
        self.streams += 1

    def stepped(self) -> None:
        pass

    def ended(self, end: ProcessEnd) -> None:
        self.ends.append(end)

    def ids(self, kind: str) -> list[str]:
        return [event.request_id for event in self.events if event.WhichOneof("body") == kind]


@dataclass
class Engine:
    """Notes what it is told."""

    ready: list[str] = field(default_factory=list)

    def items_ready(self, mm_hashes: Iterable[str]) -> None:
        self.ready += mm_hashes


@dataclass
class Pair:
    streams: EventStreams
    link: PDLink
    heard: Heard
    cancelled: list[str]
    engine: Engine

    def open(self, name: str) -> None:
        """A request that both sides know."""
        assert self.streams.open(PROXY, name, 1)
        self.link.track(name, 1, ())

    def break_stream(self) -> None:
        self.link._call.cancel()


@asynccontextmanager
async def pair(texts: TokenTexts | None = None) -> AsyncIterator[Pair]:
    """A link to a real service whose engine is this test."""
    cancelled: list[str] = []
    engine = Engine()
    streams = EventStreams(lambda ids, proxy: cancelled.extend(ids), texts=texts)
    with ThreadPoolExecutor(1) as pool:
        grpc_server = make_server(interceptors=[ErrorReplies()])
        port = grpc_server.add_insecure_port("127.0.0.1:0")
        servicer = PDServicer(engine, None, streams, TurnPool(pool, 1), TurnPool(pool, 1))  # type: ignore[arg-type]
        pd_pb2_grpc.add_PDServiceServicer_to_server(servicer, grpc_server)
        await grpc_server.start()
        async with make_channel(f"127.0.0.1:{port}") as channel:
            heard = Heard()
            link = PDLink(f"127.0.0.1:{port}", lambda: channel, PROXY, heard, heard)  # type: ignore[arg-type]
            await until(lambda: link.attached, "the first stream")
            yield Pair(streams, link, heard, cancelled, engine)
            await link.close()
        streams.shut_down()
        await grpc_server.stop(1.0)


@pytest.fixture
async def both() -> AsyncIterator[Pair]:
    async with pair() as both:
        yield both


def names(name: str) -> dict[str, Any]:
    return {"proxy_id": PROXY, "request_id": name, "attempt": 1}


def finished(name: str) -> RequestEvent:
    end = Finished(reason="stop", prompt_tokens=1, completion_tokens=1)
    return RequestEvent(finished=end, **names(name))


async def test_more_requests_than_one_call_names_are_all_taken_up_again(both: Pair) -> None:
    requests = [f"{number:032x}" for number in range(CALL_REQUESTS + 100)]
    for name in requests:
        both.open(name)
    assert both.streams.open(PROXY, "unwanted", 1)
    both.break_stream()
    await until(lambda: both.heard.streams == 2, "the second stream")
    both.streams.deliver(finished(name) for name in requests)
    await until(lambda: len(both.heard.events) >= len(requests), "all ends")
    assert sorted(both.heard.ids("finished")) == requests
    assert both.heard.losses == []
    assert both.cancelled == ["unwanted"]


async def test_requests_of_every_call_that_are_unknown_here_are_lost(both: Pair) -> None:
    requests = [f"{number:032x}" for number in range(CALL_REQUESTS + 100)]
    for name in requests:
        both.link.track(name, 1, ())
    both.break_stream()
    await until(lambda: len(both.heard.events) >= len(requests), "all losses")
    assert both.heard.ids("lost") == requests


async def test_what_is_sent_again_after_a_break_may_exceed_a_message(both: Pair) -> None:
    """Prompts of more bytes than gRPC takes at once, all of them admitted before the break."""
    prompt = tuple(range(100_000, 200_000))
    requests = [f"{number:032x}" for number in range(MESSAGE_LIMIT // (3 * len(prompt)) + 2)]
    for name in requests:
        both.open(name)
        both.streams.deliver([RequestEvent(admitted=Admitted(prompt_token_ids=prompt), **names(name))])
        await until(lambda name=name: both.heard.ids("admitted")[-1:] == [name], "the admission")
    both.heard.events.clear()
    both.break_stream()
    await until(lambda: len(both.heard.ids("admitted")) >= len(requests), "all admissions again")
    assert both.heard.ids("admitted") == requests
    assert both.heard.streams == 2


async def test_requests_of_a_worker_that_cannot_be_reached_are_lost_and_the_link_goes_on(monkeypatch):
    monkeypatch.setattr(pd_client, "REATTACH_SECONDS", 0.2)
    heard = Heard()
    async with make_channel("127.0.0.1:1") as channel:
        link = PDLink("127.0.0.1:1", lambda: channel, PROXY, heard, heard)  # type: ignore[arg-type]
        link.track("a", 1, ())
        await until(lambda: heard.losses == ["a"], "the loss")
        link.track("b", 1, ())
        await until(lambda: heard.losses == ["a", "b"], "the next loss")
        await link.close()


async def test_a_link_that_is_closed_leaves_no_task() -> None:
    heard = Heard()
    async with make_channel("127.0.0.1:1") as channel:
        link = PDLink("127.0.0.1:1", lambda: channel, PROXY, heard, heard)  # type: ignore[arg-type]
        await link.close()
        assert "attach 127.0.0.1:1" not in [task.get_name() for task in asyncio.all_tasks()]


async def test_much_output_comes_in_pieces_and_its_end_last() -> None:
    """Log-probabilities of a long answer, as after a break in its last step."""
    texts = TokenTexts(Tokenizer(WordLevel({f"{token}-of-a-vocabulary": token for token in range(50)})))
    top = tuple((token, -1.0) for token in range(20))
    async with pair(texts) as both:
        both.open("long")
        count = MESSAGE_LIMIT // 700
        logprobs = (RawLogprobs(chosen=(1, -0.5), top=top),)
        events: list[Any] = [
            Delta(position=at, token_ids=(1,), text="t", logprobs=logprobs, **names("long"))
            for at in range(count)
        ]
        both.streams.deliver([*events, finished("long")])
        await until(lambda: both.heard.ids("finished") == ["long"], "the end")
        pieces = [event.tokens for event in both.heard.events if event.HasField("tokens")]
        assert len(pieces) > 1
        assert [piece.position for piece in pieces] == [
            sum(len(earlier.token_ids) for earlier in pieces[:index]) for index in range(len(pieces))
        ]
        assert "".join(piece.text for piece in pieces) == "t" * count
        assert sum(len(piece.logprobs) for piece in pieces) == count
        assert max(piece.ByteSize() for piece in pieces) < MESSAGE_LIMIT
        assert both.heard.events[-1].HasField("finished")


async def test_the_losses_of_a_worker_that_leaves_come_after_all_pieces(both: Pair) -> None:
    count = MESSAGE_BYTES // 32
    for name in ("r1", "r2"):
        both.open(name)
        both.streams.deliver(
            Delta(position=at, token_ids=(1,), text="t", **names(name)) for at in range(count)
        )
    both.streams.shut_down()
    await until(lambda: len(both.heard.ids("lost")) == 2, "both losses")
    received = {name: 0 for name in ("r1", "r2")}
    for event in both.heard.events:
        if event.HasField("lost"):
            assert received[event.request_id] == count
        received[event.request_id] += len(event.tokens.token_ids)


async def test_more_notices_and_cancels_than_one_call_takes_all_arrive(both: Pair) -> None:
    requests = [f"{number:032x}" for number in range(CALL_REQUESTS + 100)]
    keys = [f"{number:064x}" for number in range(MAX_KEYS + 100)]
    for name in requests:
        both.open(name)
    for name in requests:
        both.link.forget(name)
        both.link.cancel(name)
    both.link.notify(tuple(keys), {})
    await until(lambda: len(both.engine.ready) >= len(keys), "all notices")
    await until(lambda: len(both.cancelled) >= len(requests), "all cancels")
    assert (both.engine.ready, both.cancelled) == (keys, requests)


async def test_an_attach_whose_names_went_to_another_process_fails_and_is_made_anew(both: Pair) -> None:
    stub = both.link._stub
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in stub.Attach(pd_pb2.AttachRequest(proxy_id="other", round="x", named_before=5)):
            pass
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    named = [pd_pb2.Reattach(request_id=f"{number}", attempt=1) for number in range(5)]
    for round in ("a", "b"):
        await stub.NameRequests(pd_pb2.AttachRequest(proxy_id="p", round=round, requests=named))
    call = stub.Attach(pd_pb2.AttachRequest(proxy_id="p", round="b", named_before=5))
    step = await asyncio.wait_for(call.read(), 20)
    assert [event.request_id for event in step.events] == [str(number) for number in range(5)]
    call.cancel()
