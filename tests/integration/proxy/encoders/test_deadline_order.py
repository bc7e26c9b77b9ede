"""A request that has little time left is encoded before those that have much."""

from __future__ import annotations

import asyncio
from typing import Any

from support.fakes.fake_workers import key_of, picture, user
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until, within
from triptych.base.rpc.channels import make_channel
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc


async def ask_within(cluster: FakeCluster, name: str, seconds: float) -> None:
    """A request over gRPC with a timeout of its own."""
    parts = [proxy_pb2.ChatPart(image=picture(name))]
    request = proxy_pb2.ChatRequest(
        messages=[proxy_pb2.ChatMessage(role="user", parts=parts)],
        sampling=common_pb2.SamplingParams(max_tokens=2),
        timeout=seconds,
    )
    async with make_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
        async for _ in stub.Chat(request):
            pass


async def test_a_request_with_a_short_timeout_is_encoded_before_earlier_ones_with_long_ones(store):
    async with FakeCluster(store, request_timeout=300.0) as cluster:
        encoder, pd = cluster.encoders[0], cluster.pd_workers[0]
        encoder.tower.clear()
        asked = []
        for number in range(4):  # the first two take the encoder's tower credit
            asked.append(asyncio.create_task(cluster.ask(user("?", picture(f"long {number}")))))
            await until(lambda: len(pd.submits) == len(asked), "a PD worker's room")
        await until(lambda: encoder.runs == 2, "the tower is full")
        urgent = asyncio.create_task(ask_within(cluster, "urgent", 60.0))
        await until(lambda: len(pd.submits) == 5, "a PD worker's room for the last")
        asked.pop(0).cancel()  # its place in the tower is free
        await until(lambda: encoder.runs == 3, "the next run")
        assert encoder.run_items[2] == key_of(picture("urgent"))
        encoder.tower.set()
        await within("all replies", asyncio.gather(urgent, *asked))
        await cluster.at_rest()
