"""Calls to a worker carry the internal token, and registrations are signed with it; health is free."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import fields, replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triptych.base.machine.worker_load import LOAD_HEADER, WorkerLoad, decode_load
from triptych.base.rpc.channels import make_channel, make_server
from triptych.base.rpc.internal_token import InternalToken
from triptych.base.types import WorkerInfo
from triptych.base.worker_process import Health
from triptych.protos import common_pb2, encoder_pb2, encoder_pb2_grpc, pd_pb2, pd_pb2_grpc

TOKEN = "the-token-of-this-test"
INFO = WorkerInfo("10.0.0.7:1", "pd", "i1", "k" * 64, "m", ("n" * 64,), {"max_num_seqs": 4}, "image")
KEY = InternalToken(TOKEN)

#: Every field of a registration, changed.
CHANGES = {
    "address": "10.0.0.8:1",
    "pool": "encoder",
    "incarnation": "i2",
    "model_key": "l" * 64,
    "model": "other",
    "namespaces": ("o" * 64,),
    "capacity": {"max_num_seqs": 5},
    "modality": "audio",
    "proof": "",
    "kind": "cuda other",
    "adapters": {"sql": "a" * 64},
}


class _PD(pd_pb2_grpc.PDServiceServicer):
    def __init__(self) -> None:
        self.calls = 0

    async def Cancel(self, request, context):
        self.calls += 1
        return common_pb2.Ack()

    async def Attach(self, request, context):
        self.calls += 1
        yield pd_pb2.StepEvents()


class _Encoder(encoder_pb2_grpc.EncoderServiceServicer):
    async def Encode(self, requests, context):
        async for _ in requests:
            yield encoder_pb2.EncodeEvent()


class _Worker:
    """A worker's server on loopback."""

    def __init__(self, token: str = TOKEN) -> None:
        self.pd = _PD()
        self.server = make_server(token)
        pd_pb2_grpc.add_PDServiceServicer_to_server(self.pd, self.server)
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(_Encoder(), self.server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def __aenter__(self) -> _Worker:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)


@pytest.fixture
async def worker() -> AsyncIterator[_Worker]:
    async with _Worker() as running:
        yield running


async def _codes(channel: Any, *, sends: bool = True) -> list[str]:
    """Of one call of each kind."""
    pd, encoder = pd_pb2_grpc.PDServiceStub(channel), encoder_pb2_grpc.EncoderServiceStub(channel)

    async def requests() -> AsyncIterator[encoder_pb2.EncodeRequest]:
        if sends:
            yield encoder_pb2.EncodeRequest()
        else:
            # gRPC may report a message that meets a refused stream as INTERNAL.
            await asyncio.Event().wait()

    # The port may have been another test's, whose end the channel's connections still pause for.
    await asyncio.wait_for(channel.channel_ready(), 30)
    calls = [
        pd.Cancel(pd_pb2.CancelRequest(), timeout=10, metadata=(("x-other", "kept"),)),
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


async def test_calls_of_all_kinds_with_the_token_are_answered(worker):
    async with make_channel(worker.address, TOKEN) as channel:
        assert await _codes(channel) == ["OK"] * 3
        stub = pd_pb2_grpc.PDServiceStub(channel)
        assert [event async for event in stub.Attach(pd_pb2.AttachRequest(), timeout=10)]


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", TOKEN[:-1], TOKEN.upper()])
async def test_a_call_without_the_token_is_refused_before_any_work(worker, token):
    async with make_channel(worker.address, token) as channel:
        assert await _codes(channel, sends=False) == ["UNAUTHENTICATED"] * 3
    assert worker.pd.calls == 0


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer x")],
        [("authorization", TOKEN)],
        [("x-triptych-token", TOKEN)],
    ],
    ids=["two headers", "no scheme", "another header"],
)
async def test_a_token_that_comes_otherwise_opens_nothing(worker, metadata):
    async with make_channel(worker.address) as channel:
        stub = pd_pb2_grpc.PDServiceStub(channel)
        assert (
            await _code(stub.Cancel(pd_pb2.CancelRequest(), timeout=10, metadata=metadata))
            == "UNAUTHENTICATED"
        )
    assert worker.pd.calls == 0


async def test_a_refused_call_does_not_read_its_message(worker):
    """What is sent without the token is never parsed: a message that is none is refused in the same words."""
    async with make_channel(worker.address) as channel:
        call = channel.unary_unary("/triptych.v1.PDService/Submit")(b"\xff" * (1 << 20), timeout=10)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


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
    assert InternalToken(of_client).has_signed(InternalToken(of_worker).signed(INFO))
    async with _Worker(of_worker) as worker, make_channel(worker.address, of_client) as channel:
        assert await _codes(channel) == ["OK"] * 3


async def test_a_token_that_was_rotated_out_opens_nothing():
    assert not InternalToken("old").has_signed(InternalToken("new").signed(INFO))
    async with _Worker("new") as worker, make_channel(worker.address, "old") as channel:
        assert await _codes(channel, sends=False) == ["UNAUTHENTICATED"] * 3


async def test_health_needs_no_token_and_is_sent_none(worker):
    sent: list[str] = []

    class Health(health.aio.HealthServicer):
        async def Check(self, request, context):
            sent.extend(name for name, _ in context.invocation_metadata())
            return await super().Check(request, context)

    server = make_server(TOKEN)
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    for token in ("", "wrong", TOKEN):
        async with make_channel(f"127.0.0.1:{port}", token) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            reply = await check(health_pb2.HealthCheckRequest(), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(None)
    assert sent and "authorization" not in sent


async def test_the_load_goes_to_those_alone_who_know_the_incarnation():
    server = make_server(TOKEN)
    worker = Health(server)
    worker.services.add("the-incarnation")
    worker.loads["the-incarnation"] = lambda: WorkerLoad("encoder-0", 0.5)
    port = server.add_insecure_port("127.0.0.1:0")
    await worker.serving()
    await server.start()
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            for service, load in (("", None), ("the-incarnation", WorkerLoad("encoder-0", 0.5))):
                check = health_pb2_grpc.HealthStub(channel).Check
                call = check(health_pb2.HealthCheckRequest(service=service), timeout=10)
                assert (await call).status == health_pb2.HealthCheckResponse.SERVING
                sent = (await call.trailing_metadata()).get(LOAD_HEADER)
                assert (sent and decode_load(sent)) == load
    finally:
        await server.stop(None)


async def test_a_worker_without_a_token_accepts_every_client():
    async with _Worker("") as worker, make_channel(worker.address) as channel:
        assert await _codes(channel) == ["OK"] * 3


async def test_no_record_error_or_object_shows_the_token(worker, caplog):
    caplog.set_level(logging.DEBUG)
    async with make_channel(worker.address, TOKEN) as channel:
        assert await _codes(channel) == ["OK"] * 3
    async with make_channel(worker.address, "a-wrong-token-of-a-stranger") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pd_pb2_grpc.PDServiceStub(channel).Cancel(pd_pb2.CancelRequest(), timeout=10)
    shown = caplog.text + repr(refused.value) + repr(KEY) + repr(KEY.signed(INFO))
    assert TOKEN not in shown and "a-wrong-token" not in shown


def test_a_signed_registration_is_accepted_with_the_token() -> None:
    assert InternalToken(TOKEN).has_signed(KEY.signed(INFO))
    assert KEY.has_signed(KEY.signed(KEY.signed(INFO)))


def test_an_unsigned_one_or_one_of_another_token_is_not() -> None:
    assert not KEY.has_signed(INFO)
    assert not InternalToken("another-token-altogether").has_signed(KEY.signed(INFO))


@pytest.mark.parametrize("field", [field.name for field in fields(WorkerInfo)])
def test_no_field_can_be_changed_after_it_was_signed(field: str) -> None:
    assert not KEY.has_signed(replace(KEY.signed(INFO), **{field: CHANGES[field]}))


def test_a_registration_without_kind_or_adapters_is_signed_as_in_releases_that_had_none() -> None:
    assert KEY.signed(INFO).proof == "8f8078bbf767aa49c7d6067339705c19a5ce619efedc535b5f37b3e8f9e088dd"


@pytest.mark.parametrize("forged", [{"proof": 5}, {"proof": "é"}, {"capacity": {b"": 1}}, {"capacity": None}])
def test_fields_of_other_kinds_are_no_error(forged: dict[str, object]) -> None:
    assert not KEY.has_signed(replace(INFO, **forged))  # type: ignore[arg-type]
