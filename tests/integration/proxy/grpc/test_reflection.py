"""Server reflection at the front door: what grpcurl reads in place of the .proto files."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from support.channels import connected_channel
from support.fakes.fake_workers import whole_text
from support.fakes.proxy_fakes import FakeCluster
from triptych.proxy.auth.keys import KeyLimits, KeyRing
from triptych.proxy.grpc import admission
from triptych.store.embedding_store import EmbeddingStore

KEY = "tk-alice-0123456789"
LIST = ServerReflectionRequest(list_services="")
SERVICES = ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "triptych.v1.ProxyService"]


async def reflected(channel: Any, *requests: ServerReflectionRequest, key: str = "") -> list[Any]:
    """The replies to requests of one call."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    call = stub.ServerReflectionInfo(metadata=metadata, timeout=20.0)
    for request in requests:
        await call.write(request)
    await call.done_writing()
    return [reply async for reply in call]


def ask_by_reflection(address: str) -> tuple[list[str], str]:
    """What a client without our .proto files finds, and the answer that it gets with them."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        chat = pool.FindServiceByName("triptych.v1.ProxyService").methods_by_name["Chat"]
        request, event = GetMessageClass(chat.input_type), GetMessageClass(chat.output_type)
        method = f"/{chat.containing_service.full_name}/{chat.name}"
        call = channel.unary_stream(method, request.SerializeToString, event.FromString)
        message = {"role": "user", "parts": [{"text": "x"}]}
        events = call(request(messages=[message], sampling={"max_tokens": 4}), timeout=20.0)
        return list(database.get_services()), "".join(event.text for event in events)


async def test_a_client_without_our_files_finds_the_services_and_is_answered(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        found = await asyncio.to_thread(ask_by_reflection, f"127.0.0.1:{cluster.grpc_port}")
    assert found == (SERVICES, whole_text(4))


async def test_the_services_of_workers_are_not_described(store: EmbeddingStore) -> None:
    asked = [
        ServerReflectionRequest(file_containing_symbol="triptych.v1.PDService"),
        ServerReflectionRequest(file_by_filename="triptych/protos/encoder.proto"),
        ServerReflectionRequest(file_containing_extension={"containing_type": "x", "extension_number": -1}),
        ServerReflectionRequest(all_extension_numbers_of_type="triptych.v1.ChatRequest"),
        ServerReflectionRequest(),
    ]
    async with FakeCluster(store) as cluster, connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        replies = await reflected(channel, *asked)
    codes = [reply.error_response.error_code for reply in replies]
    assert codes == [5, 5, 5, 0, 3]  # NOT_FOUND thrice, none, INVALID_ARGUMENT


async def test_reflection_asks_for_a_key_and_is_no_request_of_it(store, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"alice sha256:{hashlib.sha256(KEY.encode()).hexdigest()} requests-per-minute=1\n")
    keys = KeyRing("", str(path), KeyLimits())
    async with (
        FakeCluster(store, keys=keys) as cluster,
        connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflected(channel, LIST)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for _ in range(2):
            (reply,) = await reflected(channel, LIST, key=KEY)
            assert [one.name for one in reply.list_services_response.service] == SERVICES


async def test_a_reflection_call_is_counted_and_holds_nothing_once_its_client_is_silent(store):
    async with (
        FakeCluster(store, quotas={"grpc-calls": {"capacity": 1}}) as cluster,
        connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel,
    ):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        open_call = stub.ServerReflectionInfo(timeout=20.0)
        await open_call.write(LIST)
        await open_call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflected(channel, LIST)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await open_call.code() is grpc.StatusCode.OK
        assert [cluster.quotas[name].used for name in ("grpc-calls", "messages", "bodies")] == [0, 0, 0]
        assert len(await reflected(channel, LIST)) == 1


async def test_a_long_reflection_message_is_refused(store: EmbeddingStore) -> None:
    long = ServerReflectionRequest(file_by_filename="x" * admission.REFLECTION_MAX_BYTES)
    async with FakeCluster(store) as cluster, connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflected(channel, LIST, long)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
