"""The service over an engine without a model: bounds, repeats, cancels at every moment, faults."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from support.channels import connected_channel
from support.engine.engine_requests import make_request
from support.fakes.pd_client import PDClient
from support.waiting import until
from triptych.base.errors import InvalidRequest
from triptych.base.hashing import tenant_digest
from triptych.base.rpc.channels import make_server
from triptych.pd_worker import server as pd_server
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.events.streams import EventStreams
from triptych.pd_worker.server import PDServicer
from triptych.pd_worker.turn_pool import TurnPool
from triptych.protos import pd_pb2, pd_pb2_grpc
from triptych.protos.error_replies import ErrorReplies
from triptych.protos.pd_pb2 import Finished, RequestEvent

LONG = 64 << 10
QUEUED, REFUSED = pd_pb2.SubmitReply.STATUS_QUEUED, pd_pb2.SubmitReply.STATUS_REFUSED


@dataclass
class Engine:
    """Notes what it is told."""

    submitted: list[str] = field(default_factory=list)
    requests: list[EngineRequest] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    paused: list[tuple[str, ...]] = field(default_factory=list)
    fault: Exception | None = None

    def submit(self, request):
        if self.fault:
            raise self.fault
        self.submitted.append(request.request_id)
        self.requests.append(request)

    def items_ready(self, mm_hashes):
        if self.fault:
            raise self.fault
        self.ready.extend(mm_hashes)

    def cancel(self, request_ids, proxy_id):
        self.cancelled.extend(request_ids)

    def pause(self, paused, resumed, proxy_id):
        self.paused += [(proxy_id, *paused, "", *resumed)]


@dataclass
class InputProcessor:
    """Passes everything; waits for `gate`, and for `texts` with a long prompt."""

    gate: threading.Event = field(default_factory=threading.Event)
    texts: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    fault: Exception | None = None
    #: Holds Tokenize and Detokenize while cleared; `asked` are those that have begun.
    queries: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)

    def tokenize(self, message):
        self.asked.append("tokenize")
        assert self.queries.wait(20)
        return pd_pb2.TokenizeReply(token_ids=[1])

    def detokenize(self, message):
        self.asked.append("detokenize")
        assert self.queries.wait(20)
        return pd_pb2.DetokenizeReply(text="x")

    def process(self, message, arrival):
        self.entered.set()
        assert self.gate.wait(20)
        assert message.ByteSize() < LONG or self.texts.wait(20)
        if self.fault:
            raise self.fault
        return make_request(message.request_id, 3, attempt=message.attempt, proxy_id=message.proxy_id)


def _finished(request):
    names = {"request_id": request.request_id, "attempt": request.attempt, "proxy_id": request.proxy_id}
    end = Finished(reason="stop", prompt_tokens=3, completion_tokens=1)
    return RequestEvent(finished=end, **names)


@dataclass
class Service:
    engine: Engine
    input_processor: InputProcessor
    streams: EventStreams
    client: PDClient


@pytest.fixture
async def s(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    engine, input_processor = Engine(), InputProcessor()
    input_processor.gate.set()
    streams = EventStreams(engine.cancel)
    options = dict(getattr(request, "param", {}))
    threads = options.pop("threads", 1)
    with ThreadPoolExecutor(threads) as pool, ThreadPoolExecutor(1) as queries:
        server = make_server(interceptors=[ErrorReplies()])
        port = server.add_insecure_port("127.0.0.1:0")
        servicer = PDServicer(
            engine, input_processor, streams, TurnPool(pool, threads), TurnPool(queries, 1), **options
        )
        pd_pb2_grpc.add_PDServiceServicer_to_server(servicer, server)
        await server.start()
        try:
            async with connected_channel(f"127.0.0.1:{port}") as channel:
                client = PDClient(channel, "key")
                await client.attach()
                yield Service(engine, input_processor, streams, client)
                await client.detach()
        finally:
            input_processor.gate.set()
            input_processor.texts.set()
            input_processor.queries.set()
            streams.shut_down()
            await server.stop(1.0)


@pytest.mark.parametrize("s", [{"max_requests": 1}], indirect=True)
async def test_a_full_worker_refuses_new_requests_and_takes_resumed_ones(s):
    assert (await s.client.submit(s.client.message("r1", "x"))).status == QUEUED
    refused = await s.client.submit(s.client.message("r2", "x"))
    assert (refused.status, refused.error.code, refused.error.retry_after) == (REFUSED, "overloaded", 1.0)
    assert (await s.client.submit(s.client.message("r3", "x", attempt=2))).status == QUEUED
    planned = s.client.message("r4", "x", attempt=2)
    planned.resume.planned = True
    refused = await s.client.submit(planned)
    assert (refused.status, refused.error.code) == (REFUSED, "overloaded"), "its prefill worker still has it"
    assert s.engine.submitted == ["r1", "r3"]


@pytest.mark.parametrize("s", [{"threads": 2}], indirect=True)
async def test_a_small_request_is_taken_while_long_texts_are_prepared(s):
    messages = [s.client.message(f"long{number}", "x" * LONG) for number in range(4)]
    long = [asyncio.create_task(s.client.submit(message)) for message in messages]
    await asyncio.to_thread(s.input_processor.entered.wait, 20)
    assert (await s.client.submit(s.client.message("small", "x"))).status == QUEUED
    assert s.engine.submitted == ["small"]
    s.input_processor.texts.set()
    assert {reply.status for reply in await asyncio.gather(*long)} == {QUEUED}


@pytest.mark.parametrize("method", ["Tokenize", "Detokenize"])
async def test_requests_are_taken_while_queries_fill_their_threads(s, method):
    """Of a hundred queries none has been answered when twenty requests have reached the engine."""
    message = pd_pb2.TokenizeRequest() if method == "Tokenize" else pd_pb2.DetokenizeRequest()
    calls = [getattr(s.client.stub, method)(message, timeout=60) for _ in range(100)]
    await until(lambda: s.input_processor.asked)
    for index in range(20):
        reply = await s.client.submit(s.client.message(f"r{index}", "x"))
        assert reply.status == QUEUED
    assert len(s.engine.submitted) == 20
    assert not any(call.done() for call in calls)
    s.input_processor.queries.set()
    replies = [await call for call in calls]
    assert not any(reply.HasField("error") for reply in replies)


async def test_queries_above_their_number_are_refused_and_the_others_answered(s, monkeypatch):
    monkeypatch.setattr(pd_server, "MAX_QUERIES", 3)
    calls = [s.client.stub.Tokenize(pd_pb2.TokenizeRequest(), timeout=60) for _ in range(4)]
    await until(lambda: any(call.done() for call in calls))
    s.input_processor.queries.set()
    codes = [(await call).error.code for call in calls]
    assert sorted(codes) == ["", "", "", "overloaded"]
    assert not (await s.client.stub.Tokenize(pd_pb2.TokenizeRequest(), timeout=60)).HasField("error")


async def test_an_attempt_that_is_submitted_twice_is_taken_once_and_an_earlier_one_refused(s: Service):
    for _ in range(2):
        assert (await s.client.submit(s.client.message("r1", "x", attempt=2))).status == QUEUED
    refused = await s.client.submit(s.client.message("r1", "x", attempt=1))
    assert (refused.status, refused.error.param) == (REFUSED, "request_id")
    assert s.engine.submitted == ["r1"]
    assert (s.engine.cancelled, s.streams.unfinished) == ([], 1)


async def test_an_attempt_that_is_submitted_again_while_it_is_prepared_gets_the_answer_of_the_first(
    s: Service,
):
    s.input_processor.gate.clear()
    first = s.client.stub.Submit(s.client.message("r1", "x"), timeout=30)
    await asyncio.to_thread(s.input_processor.entered.wait, 10)
    again = s.client.stub.Submit(s.client.message("r1", "x"), timeout=30)
    first.cancel()
    s.input_processor.gate.set()
    assert (await again).status == QUEUED
    assert s.engine.submitted == ["r1"]


async def test_a_refusal_that_was_lost_is_given_again(s: Service):
    s.input_processor.fault = InvalidRequest("no", param="stop")
    for _ in range(2):
        refused = await s.client.submit(s.client.message("r1", "x"))
        assert (refused.status, refused.error.param) == (REFUSED, "stop")
        s.input_processor.fault = None
    assert s.engine.submitted == []


async def test_an_attempt_that_has_ended_is_not_taken_a_second_time(s: Service):
    for request_id in ("finished", "cancelled"):
        assert (await s.client.submit(s.client.message(request_id, "x"))).status == QUEUED
    done = make_request("finished", 3, proxy_id="proxy")
    s.streams.deliver([_finished(done)])
    await s.client.until("finished")
    await s.client.stub.Cancel(pd_pb2.CancelRequest(proxy_id="proxy", request_ids=["cancelled"]))
    replies = [await s.client.submit(s.client.message(name, "x")) for name in ("finished", "cancelled")]
    assert [reply.status for reply in replies] == [QUEUED, REFUSED], "the end of the first is still sent"
    assert s.engine.submitted == ["finished", "cancelled"]
    for request_id in ("finished", "cancelled"):
        assert (await s.client.submit(s.client.message(request_id, "x", attempt=2))).status == QUEUED


async def test_a_tenant_that_fills_the_input_threads_keeps_another_one_waiting_for_one_text(s: Service):
    s.input_processor.gate.clear()
    calls = []
    for arrived, name in enumerate([*(f"a{i}" for i in range(20)), "b"], 1):
        message = s.client.message(name, "x")
        message.tenant = name[0] * 16
        calls.append(s.client.stub.Submit(message, timeout=60))
        # Calls under way at once may arrive in any order.
        await until(lambda arrived=arrived: s.streams.unfinished == arrived)
    s.input_processor.gate.set()
    assert {(await call).status for call in calls} == {QUEUED}
    assert s.engine.submitted.index("b") <= 2
    assert [name for name in s.engine.submitted if name != "b"] == [f"a{i}" for i in range(20)]


async def test_a_submit_names_its_tenant_by_a_digest_or_not_at_all_as_proxies_of_an_earlier_release(
    s: Service,
):
    for tenant, status in (("", QUEUED), (tenant_digest("alice"), QUEUED), ("alice", REFUSED)):
        message = s.client.message(f"r{tenant}", "x")
        message.tenant = tenant
        assert (await s.client.submit(message)).status == status
    old = pd_pb2.SubmitRequest.FromString(s.client.message("old", "x").SerializeToString())
    assert old.tenant == "" and (await s.client.submit(old)).status == QUEUED


@pytest.mark.parametrize("s", [{"max_requests": 4}], indirect=True)
async def test_a_tenant_that_fills_the_worker_leaves_others_their_share(s: Service):
    def message(name: str, tenant: str) -> pd_pb2.SubmitRequest:
        made = s.client.message(name, "x")
        made.tenant = tenant * 16
        return made

    statuses = [(await s.client.submit(message(f"a{i}", "a"))).status for i in range(5)]
    assert statuses == [QUEUED] * 4 + [REFUSED]
    statuses = [(await s.client.submit(message(f"b{i}", "b"))).status for i in range(3)]
    assert statuses == [QUEUED] * 2 + [REFUSED]


async def test_a_request_cancelled_while_it_is_tokenised_never_reaches_the_engine(s: Service):
    s.input_processor.gate.clear()
    submitting = asyncio.create_task(s.client.submit(s.client.message("r1", "x")))
    await asyncio.to_thread(s.input_processor.entered.wait, 10)
    await s.client.stub.Cancel(pd_pb2.CancelRequest(proxy_id="proxy", request_ids=["r1"]))
    s.input_processor.gate.set()
    assert (await submitting).status == REFUSED
    assert s.engine.submitted == []
    assert s.streams.unfinished == 0


@pytest.mark.parametrize(
    ("fault", "code"),
    [(InvalidRequest("no", param="stop"), "invalid_request_error"), (RuntimeError("boom"), "internal_error")],
)
@pytest.mark.parametrize("where", ["input_processor", "engine"])
async def test_a_fault_at_the_door_is_answered_and_leaves_nothing(s, where, fault, code):
    getattr(s, where).fault = fault
    reply = await s.client.submit(s.client.message("r1", "x"))
    assert (reply.status, reply.error.code) == (REFUSED, code)
    assert "boom" not in reply.error.message
    assert s.streams.unfinished == 0
