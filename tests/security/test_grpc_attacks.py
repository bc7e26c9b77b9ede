"""Group 9: what a gRPC client can send to the front door beside what it is meant to."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from grpc import aio

from support.hostile.attacks import MODEL, Target
from triptych.protos import proxy_pb2, proxy_pb2_grpc

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
OPTIONS += [("grpc.max_metadata_size", 1 << 26), ("grpc.absolute_max_metadata_size", 1 << 26)]


def hello(text: str = "hello", image: bytes = b"") -> proxy_pb2.ChatRequest:
    parts = [proxy_pb2.ChatPart(text=text)]
    if image:
        parts.append(proxy_pb2.ChatPart(image=image))
    message = proxy_pb2.ChatMessage(role="user", parts=parts)
    request = proxy_pb2.ChatRequest(model=MODEL, messages=[message])
    request.sampling.max_tokens = 2
    return request


async def code_of(target: Target, request: proxy_pb2.ChatRequest, **options: object) -> grpc.StatusCode:
    async with aio.insecure_channel(target.cluster.grpc_address, options=OPTIONS) as channel:
        stub = proxy_pb2_grpc.ProxyServiceStub(channel)
        try:
            async for _ in stub.Chat(request, timeout=60, **options):
                pass
        except aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_a_message_above_the_limit_is_refused(target: Target) -> None:
    assert await code_of(target, hello("x" * (100 << 20))) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_text_far_beyond_the_model_is_refused_by_its_name(target: Target) -> None:
    assert await code_of(target, hello("x " * (4 << 20))) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_flood_of_metadata_is_refused(target: Target) -> None:
    flood = tuple((f"x-{index}", "y" * 1000) for index in range(2000))
    assert await code_of(target, hello(), metadata=flood) is not grpc.StatusCode.OK


async def test_a_thousand_streams_that_are_let_go_hold_nothing(target: Target) -> None:
    async with aio.insecure_channel(target.cluster.grpc_address, options=OPTIONS) as channel:
        stub = proxy_pb2_grpc.ProxyServiceStub(channel)
        calls = [stub.Chat(hello(str(index)), timeout=60) for index in range(1000)]
        for call in calls:
            with contextlib.suppress(aio.AioRpcError, asyncio.CancelledError):
                call.cancel()
        await asyncio.gather(*(call.code() for call in calls))


@pytest.mark.parametrize(
    "method",
    [
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.channelz.v1.Channelz/GetServers",
        "/triptych.v1.PDService/Submit",
        "/triptych.v1.EncoderService/Encode",
        "/triptych.v1.ProxyService/../PDService/Submit",
    ],
)
async def test_the_front_door_has_no_inner_services(target: Target, method: str) -> None:
    async with aio.insecure_channel(target.cluster.grpc_address) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await channel.unary_unary(method)(b"", timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_no_message_end_the_call_alone(target: Target) -> None:
    async with aio.insecure_channel(target.cluster.grpc_address) as channel:
        chat = channel.unary_stream("/triptych.v1.ProxyService/Chat")
        with pytest.raises(aio.AioRpcError):
            async for _ in chat(b"\xff" * 1000, timeout=30):
                pass


async def test_a_picture_that_is_none_is_refused_with_its_field(target: Target) -> None:
    assert await code_of(target, hello(image=b"\x00" * 1000)) is grpc.StatusCode.INVALID_ARGUMENT
