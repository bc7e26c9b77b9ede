"""Errors of a worker's calls, as their clients see them on a real connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from triptych.base.errors import InvalidRequest, Unavailable
from triptych.base.rpc.channels import make_channel, make_server
from triptych.protos import encoder_pb2_grpc, pd_pb2, pd_pb2_grpc
from triptych.protos.error_replies import ErrorReplies

BUSY = Unavailable("this worker is busy", param="prompt", retry_after=1.5)


class Raising(pd_pb2_grpc.PDServiceServicer, encoder_pb2_grpc.EncoderServiceServicer):
    """A worker whose every call ends with `error`, a stream's after one message."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def Tokenize(self, request: Any, context: Any) -> Any:
        raise self.error

    async def Cancel(self, request: Any, context: Any) -> Any:
        raise self.error

    async def Pause(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "its own")

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield pd_pb2.StepEvents()
        raise self.error

    async def SplitVideo(self, request_iterator: Any, context: Any) -> Any:
        raise self.error


class Client:
    def __init__(self, channel: aio.Channel, servicer: Raising) -> None:
        self.pd: Any = pd_pb2_grpc.PDServiceStub(channel)
        self.encoder: Any = encoder_pb2_grpc.EncoderServiceStub(channel)
        self.servicer = servicer


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    server, servicer = make_server(interceptors=[ErrorReplies()]), Raising(BUSY)
    pd_pb2_grpc.add_PDServiceServicer_to_server(servicer, server)
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            yield Client(channel, servicer)
    finally:
        await server.stop(0)


async def test_an_error_is_the_replys_where_it_has_one(client: Client) -> None:
    error = (await client.pd.Tokenize(pd_pb2.TokenizeRequest())).error
    assert (error.code, error.message, error.param, error.retry_after) == (
        "unavailable",
        BUSY.message,
        "prompt",
        1.5,
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BUSY, grpc.StatusCode.UNAVAILABLE),
        (InvalidRequest("proxy_id: too long", param="proxy_id"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_an_error_is_the_status_of_other_calls(client: Client, error: Any, code: object) -> None:
    client.servicer.error = error
    calls = (client.pd.Cancel(pd_pb2.CancelRequest()), client.encoder.SplitVideo(iter(())))
    for call in calls:
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        assert (caught.value.code(), caught.value.details()) == (code, error.message)


async def test_a_stream_ends_with_the_error_behind_what_it_has_sent(client: Client) -> None:
    call, messages = client.pd.Attach(pd_pb2.AttachRequest()), []
    with pytest.raises(aio.AioRpcError) as caught:
        async for message in call:
            messages.append(message)
    assert messages == [pd_pb2.StepEvents()]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_what_nobody_expected_is_logged_and_says_nothing_of_this_process(client, caplog):
    client.servicer.error = ValueError("/secret/path")
    assert (await client.pd.Tokenize(pd_pb2.TokenizeRequest())).error.code == "internal_error"
    with pytest.raises(aio.AioRpcError) as caught:
        await client.pd.Cancel(pd_pb2.CancelRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value.details())
    assert [record.message for record in caplog.records] == ["Tokenize failed", "Cancel failed"]


async def test_a_status_of_the_methods_own_stays(client: Client) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await client.pd.Pause(pd_pb2.PauseRequest())
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "its own")


async def test_a_call_that_a_release_lacks_stays_unimplemented(client: Client) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await client.pd.NotifyItems(pd_pb2.ItemsNotice())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
