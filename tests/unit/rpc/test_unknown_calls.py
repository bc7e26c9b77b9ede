"""A worker says that it is called by a proxy of another release."""

from __future__ import annotations

import logging

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triptych.base.rpc.channels import UnknownCalls, make_channel, make_server


async def test_a_call_that_a_release_lacks_is_named_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    server = make_server("token", [UnknownCalls(lambda: now[0])])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    caplog.set_level(logging.WARNING)
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert caplog.records == []
            challenge = channel.unary_unary("/triptych.v1.Auth/Challenge")
            for said in (1, 1, 2):
                with pytest.raises(aio.AioRpcError) as caught:
                    await challenge(b"")
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
                assert [record.levelname for record in caplog.records] == ["WARNING"] * said
                now[0] += 40.0
        assert "'/triptych.v1.Auth/Challenge'" in caplog.text and "proxies first" in caplog.text
    finally:
        await server.stop(None)
