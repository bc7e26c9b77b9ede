"""The internal token guards every call but health checks."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triptych.protos import common_pb2, pd_pb2, pd_pb2_grpc
from triptych.rpc import make_channel, make_server


class _Servicer(pd_pb2_grpc.PDServiceServicer):
    async def Cancel(self, request, context):
        return common_pb2.Ack()

    async def Attach(self, request, context):
        yield pd_pb2.StepEvents()


@pytest.fixture
async def guarded():
    server = make_server("secret")
    pd_pb2_grpc.add_PDServiceServicer_to_server(_Servicer(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_call_with_the_token_is_answered(guarded):
    async with make_channel(guarded, "secret") as channel:
        stub = pd_pb2_grpc.PDServiceStub(channel)
        await stub.Cancel(pd_pb2.CancelRequest(), timeout=5)
        assert [event async for event in stub.Attach(pd_pb2.AttachRequest(), timeout=5)]


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_a_call_without_the_right_token_is_refused(guarded, token):
    async with make_channel(guarded, token) as channel:
        stub = pd_pb2_grpc.PDServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.Cancel(pd_pb2.CancelRequest(), timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            async for _ in stub.Attach(pd_pb2.AttachRequest(), timeout=5):
                pass
    assert unary.value.code() is stream.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_needs_no_token(guarded):
    async with make_channel(guarded) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
