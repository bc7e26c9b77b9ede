"""Calls to a worker prove that they know the internal token; health checks are free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triptych.base.rpc.channels import make_channel, make_server
from triptych.base.rpc.client_auth import WorkerSession
from triptych.base.rpc.proofs import SIZE, InternalKey, InternalKeys, client_nonce, identity_of, worker_nonce
from triptych.base.rpc.server_auth import SESSION_HEADER, SESSION_SECONDS, WorkerAuth
from triptych.base.types import WorkerInfo
from triptych.protos import common_pb2, encoder_pb2, encoder_pb2_grpc, pd_pb2, pd_pb2_grpc

TOKEN = "the-token-of-this-test"


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class _PD(pd_pb2_grpc.PDServiceServicer):
    def __init__(self) -> None:
        self.sessions: list[bytes] = []

    async def Cancel(self, request, context):
        self.sessions += [value for key, value in context.invocation_metadata() if key == SESSION_HEADER]
        return common_pb2.Ack()

    async def Attach(self, request, context):
        yield pd_pb2.StepEvents()


class _Encoder(encoder_pb2_grpc.EncoderServiceServicer):
    async def Encode(self, requests, context):
        async for _ in requests:
            yield encoder_pb2.EncodeEvent()


class _Worker:
    """A worker's server; `info` is its registration."""

    def __init__(self, token: str = TOKEN, incarnation: str = "i1", port: int = 0) -> None:
        self.clock = _Clock()
        self.door = WorkerAuth(token, self.clock)
        self.pd = _PD()
        self.server = make_server(self.door)
        pd_pb2_grpc.add_PDServiceServicer_to_server(self.pd, self.server)
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(_Encoder(), self.server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{port}')}"
        self.info = self.door.add_worker(WorkerInfo(self.address, "pd", incarnation, "k", "m"))

    async def __aenter__(self) -> _Worker:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)


@pytest.fixture
async def worker() -> AsyncIterator[_Worker]:
    async with _Worker() as running:
        yield running


async def _codes(channel: Any) -> list[str]:
    """Of one call of each kind."""
    pd, encoder = pd_pb2_grpc.PDServiceStub(channel), encoder_pb2_grpc.EncoderServiceStub(channel)

    async def requests() -> AsyncIterator[encoder_pb2.EncodeRequest]:
        yield encoder_pb2.EncodeRequest()

    calls = [
        pd.Cancel(pd_pb2.CancelRequest(), timeout=10),
        pd.Attach(pd_pb2.AttachRequest(), timeout=10),
        encoder.Encode(requests(), timeout=10),
    ]
    return [await _code(call) for call in calls]


async def _code(call: Any) -> str:
    """The call's code, once all of its answer has been read."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def test_calls_of_all_kinds_that_prove_the_token_are_answered(worker):
    async with make_channel(worker.address, WorkerSession(TOKEN, worker.info)) as channel:
        assert await _codes(channel) == ["OK"] * 3
        stub = pd_pb2_grpc.PDServiceStub(channel)
        assert [event async for event in stub.Attach(pd_pb2.AttachRequest(), timeout=10)]


async def test_a_call_without_a_proof_is_refused(worker):
    async with make_channel(worker.address) as channel:
        # The port may have been another test's, whose end the channel's connections still pause for.
        await asyncio.wait_for(channel.channel_ready(), 30)
        assert await _codes(channel) == ["UNAUTHENTICATED"] * 3


@pytest.mark.parametrize("token", ["wrong", TOKEN + " ", TOKEN[:-1], TOKEN.upper()])
async def test_a_client_with_another_token_can_call_no_worker(worker, token):
    async with make_channel(worker.address, WorkerSession(token, worker.info)) as channel:
        assert await _codes(channel) == ["UNAVAILABLE"] * 3
    assert worker.pd.sessions == []


@pytest.mark.parametrize(
    ("of_worker", "of_client"),
    [
        # The steps of a rotation, each with processes that have not taken it yet.
        ("old", "old\nnew"),
        ("old\nnew", "old"),
        ("old\nnew", "new\nold"),
        ("new\nold", "old\nnew"),
        ("new\nold", "new"),
        ("new", "new\nold"),
    ],
)
async def test_workers_and_proxies_agree_at_each_step_of_a_tokens_rotation(of_worker, of_client):
    async with _Worker(token=of_worker) as worker:
        assert InternalKeys(of_client).has_signed(worker.info)
        session = WorkerSession(of_client, worker.info)
        async with make_channel(worker.address, session) as channel:
            assert await _codes(channel) == ["OK"] * 3


async def test_a_token_that_was_rotated_out_opens_nothing():
    async with _Worker(token="new") as worker:
        assert not InternalKeys("old").has_signed(worker.info)
        async with make_channel(worker.address, WorkerSession("old", worker.info)) as channel:
            assert await _codes(channel) == ["UNAVAILABLE"] * 3


async def test_health_needs_no_proof(worker):
    for session in (None, WorkerSession("wrong", worker.info)):
        async with make_channel(worker.address, session) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            reply = await check(health_pb2.HealthCheckRequest(), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_worker_without_a_token_accepts_every_client():
    async with _Worker(token="") as worker, make_channel(worker.address) as channel:
        assert await _codes(channel) == ["OK"] * 3
        assert worker.info.proof == ""


async def test_one_challenge_serves_all_calls_of_a_connection_until_half_of_its_time(worker):
    clock = _Clock()
    async with make_channel(worker.address, WorkerSession(TOKEN, worker.info, clock)) as channel:
        stub = pd_pb2_grpc.PDServiceStub(channel)
        for _ in range(3):
            await stub.Cancel(pd_pb2.CancelRequest(), timeout=10)
        clock.now += SESSION_SECONDS / 2
        await stub.Cancel(pd_pb2.CancelRequest(), timeout=10)
    first, *same, renewed = worker.pd.sessions
    assert same == [first, first]
    assert renewed != first


async def test_a_proof_that_is_too_old_is_made_again(worker):
    async with make_channel(worker.address, WorkerSession(TOKEN, worker.info)) as channel:
        assert await _codes(channel) == ["OK"] * 3
        worker.clock.now += SESSION_SECONDS + 1
        # A call whose answer has one message is asked again at once; streams are when they are started again.
        assert await _codes(channel) == ["OK", "UNAUTHENTICATED", "UNAUTHENTICATED"]
        assert await _codes(channel) == ["OK"] * 3
        worker.clock.now += SESSION_SECONDS + 1
        stub = pd_pb2_grpc.PDServiceStub(channel)
        assert await _code(stub.Attach(pd_pb2.AttachRequest(), timeout=10)) == "UNAUTHENTICATED"
        async with asyncio.timeout(10):
            while await _code(stub.Attach(pd_pb2.AttachRequest(), timeout=10)) != "OK":
                pass


async def _call(address: str, session: bytes) -> str:
    async with make_channel(address) as channel:
        stub = pd_pb2_grpc.PDServiceStub(channel)
        call = stub.Cancel(pd_pb2.CancelRequest(), metadata=((SESSION_HEADER, session),), timeout=10)
        return str((await call.code()).name)


async def test_no_part_of_a_proof_may_be_another(worker):
    async with make_channel(worker.address, WorkerSession(TOKEN, worker.info)) as channel:
        await pd_pb2_grpc.PDServiceStub(channel).Cancel(pd_pb2.CancelRequest(), timeout=10)
    [good] = worker.pd.sessions
    assert await _call(worker.address, good) == "OK"
    for place in range(0, len(good), SIZE // 2):
        forged = bytearray(good)
        forged[place] ^= 1
        assert await _call(worker.address, bytes(forged)) == "UNAUTHENTICATED", place
    for forged in (good[:-1], good + b"\0", b"", good[:SIZE]):
        assert await _call(worker.address, forged) == "UNAUTHENTICATED"
    worker.clock.now += SESSION_SECONDS + 1
    assert await _call(worker.address, good) == "UNAUTHENTICATED"


async def test_a_workers_proof_does_not_do_as_a_clients(worker):
    key, identity = InternalKey(TOKEN), identity_of(worker.info)
    client, own = client_nonce(), worker_nonce(worker.clock.now)
    parts = identity + client + own
    assert await _call(worker.address, parts + key.client_proof(identity, client, own)) == "OK"
    assert await _call(worker.address, parts + key.worker_proof(identity, client, own)) == "UNAUTHENTICATED"


async def test_proofs_to_one_worker_open_no_other(worker):
    async with _Worker() as other:
        async with make_channel(worker.address, WorkerSession(TOKEN, worker.info)) as channel:
            await pd_pb2_grpc.PDServiceStub(channel).Cancel(pd_pb2.CancelRequest(), timeout=10)
        assert await _call(other.address, worker.pd.sessions[0]) == "UNAUTHENTICATED"


async def test_another_incarnation_at_the_address_gets_nothing_until_it_is_expected():
    async with _Worker() as first:
        session = WorkerSession(TOKEN, first.info)
        channel = make_channel(first.address, session)
        assert await _codes(channel) == ["OK"] * 3
    async with channel, _Worker(incarnation="i2", port=int(first.address.rpartition(":")[2])) as second:
        check = health_pb2_grpc.HealthStub(channel).Check
        # Health connects again, and is no call that says who is there.
        await check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True)
        assert await _codes(channel) == ["UNAVAILABLE"] * 3
        assert second.pd.sessions == []
        session.expect(second.info)
        assert await _codes(channel) == ["OK"] * 3


async def test_a_connection_that_came_back_unseen_carries_no_proof_of_the_one_before(monkeypatch):
    async with _Worker() as first:
        session = WorkerSession(TOKEN, first.info)
        channel = make_channel(first.address, session)
        assert await _codes(channel) == ["OK"] * 3
        # A look at the channel's state never meets the moment in which it is broken.
        monkeypatch.setattr(session, "check_connection", lambda: None)
    async with channel, _Worker(incarnation="i2", port=int(first.address.rpartition(":")[2])) as second:
        check = health_pb2_grpc.HealthStub(channel).Check
        await check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True)
        assert await _codes(channel) == ["UNAVAILABLE"] * 3
        assert second.pd.sessions == []


async def test_calls_that_begin_together_share_one_challenge(worker, monkeypatch):
    asked = []
    made = WorkerSession._authenticate

    async def counted(self, identity):
        asked.append(identity)
        return await made(self, identity)

    monkeypatch.setattr(WorkerSession, "_authenticate", counted)
    async with make_channel(worker.address, WorkerSession(TOKEN, worker.info)) as channel:
        stub = pd_pb2_grpc.PDServiceStub(channel)
        calls = [stub.Cancel(pd_pb2.CancelRequest(), timeout=10) for _ in range(8)]
        assert {(await call.code()).name for call in calls} == {"OK"}
    assert len(asked) == 1


async def test_calls_that_wait_for_one_challenge_fail_together():
    """Before a process that takes connections and says nothing they would else wait one after another."""
    asked = []

    async def silent(reader, writer):
        asked.append(asyncio.current_task())
        try:
            await reader.read()
        finally:
            writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    info = WorkerInfo(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "pd", "i", "k", "m")
    session = WorkerSession(TOKEN, info)
    attempts = []
    made = session._authenticate

    async def counted(identity):
        attempts.append(identity)
        return await made(identity)

    session._authenticate = counted
    async with server:
        async with make_channel(info.address, session) as channel:
            stub = pd_pb2_grpc.PDServiceStub(channel)
            calls = [stub.Cancel(pd_pb2.CancelRequest(), timeout=10) for _ in range(16)]
            assert {await _code(call) for call in calls} == {"UNAVAILABLE"}
        server.close()
        # A connection that was accepted last begins with the next turn of the loop, and ends with its client.
        await asyncio.sleep(0.1)
        await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
    assert len(attempts) == 1


async def test_a_call_that_is_given_up_leaves_the_challenge_to_the_others(worker):
    async with make_channel(worker.address, WorkerSession(TOKEN, worker.info)) as channel:
        stub = pd_pb2_grpc.PDServiceStub(channel)
        first, second = (stub.Cancel(pd_pb2.CancelRequest(), timeout=10) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert await _code(second) == "OK"


async def test_a_refused_call_does_not_read_its_message(worker):
    """What is sent without a proof is never parsed: a message that is none is refused in the same words."""
    async with make_channel(worker.address) as channel:
        call = channel.unary_unary("/triptych.v1.PDService/Submit")(b"\xff" * (1 << 20), timeout=10)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
