"""A request's priority, from every front door to the order in which a key's requests reach the workers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from openai import APIStatusError

from support.channels import connected_channel
from support.fakes.fake_workers import key_of, picture, user
from support.fakes.proxy_fakes import FakeCluster
from support.hostile.two_tenants import A, B, chat_body, two_tenants
from support.waiting import until, within
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.proxy.pd import link as link_module
from triptych.proxy.pd.window import ALONE
from triptych.store.embedding_store import EmbeddingStore

TEXT = user("count")
#: One Submit at a time, however fast the answers: of two at once either may arrive first.
ONE = replace(ALONE, first=1.0, least=1.0, slow=-1.0)
Sampling = common_pb2.SamplingParams(max_tokens=2)


async def test_a_key_has_its_requests_served_by_priority_and_takes_no_turn_of_another_one(
    store: EmbeddingStore, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ALONE", "SHARED"):
        monkeypatch.setattr(link_module, name, ONE)
    async with AsyncExitStack() as stack:
        tenants = await two_tenants(store, tmp_path, stack)
        [worker] = tenants.cluster.pd_workers
        router = tenants.cluster.dispatcher._router
        worker.door.clear()
        asked = []
        for who, priorities in ((A, (0, 7, -100, 0, -3)), (B, (100, 50))):
            for priority in priorities:
                body = chat_body("x", priority=priority)
                asked.append(asyncio.create_task(tenants.post(who, body)))
                await until(lambda: router.load[0] == len(asked), "the request")
        await until(lambda: len(worker.submits) == 2, "the first Submit of either")
        worker.door.set()
        assert await asyncio.gather(*asked) == [200] * 7
        order: dict[str, list[int]] = {}
        for submit in worker.submits:
            order.setdefault(submit.tenant, []).append(submit.priority)
        assert list(order.values()) == [[0, -100, -3, 0, 7], [100, 50]]
        whose = [submit.tenant for submit in worker.submits]
        assert whose.index(whose[1], 2) <= 4, "the other one's second request waits for one of the first's"
        await tenants.cluster.at_rest()


async def test_a_picture_of_lower_priority_is_encoded_before_earlier_ones(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        [encoder] = cluster.encoders
        encoder.tower.clear()
        asked = []
        for number in range(4):  # the first two take the encoder's tower credit
            messages = user("?", picture(f"first {number}"))
            asked.append(asyncio.create_task(cluster.ask(messages, extra_body={"priority": 1})))
            await until(lambda: cluster.admitted == len(asked), "a PD worker's room")
        await until(lambda: encoder.runs == 2, "the tower is full")
        lower = asyncio.create_task(cluster.ask(user("?", picture("lower"))))
        await until(lambda: cluster.admitted == 5, "a PD worker's room for the last")
        asked.pop(0).cancel()  # its place in the tower is free
        await until(lambda: encoder.runs == 3, "the next run")
        assert encoder.run_items[2] == key_of(picture("lower"))
        assert [job.priority for job in encoder.jobs] == [1, 1, 1, 1, 0]
        encoder.tower.set()
        await within("all replies", asyncio.gather(lower, *asked))
        await cluster.at_rest()


async def test_every_kind_of_request_has_one(cluster: FakeCluster) -> None:
    [worker] = cluster.pd_workers
    client, extra = cluster.client, {"priority": -4}
    await cluster.ask(TEXT, extra_body=extra)
    await client.completions.create(model="demo", prompt="x", max_tokens=2, extra_body=extra)
    await client.responses.create(model="demo", input="x", max_output_tokens=2, extra_body=extra)
    await client.embeddings.create(model="demo", input="x", extra_body=extra)
    messages = [{"role": "user", "content": "x"}]
    await client.embeddings.create(
        model="demo", input=[], extra_body={**extra, "messages": messages, "input": None}
    )
    assert [submit.priority for submit in worker.submits] == [-4] * 5
    await cluster.ask(TEXT)
    assert worker.submits[-1].priority == 0


async def test_every_kind_of_call_has_one(cluster: FakeCluster) -> None:
    [worker] = cluster.pd_workers
    part = proxy_pb2.ChatPart(text="x")
    message = proxy_pb2.ChatMessage(role="user", parts=[part])
    async with connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
        chat = proxy_pb2.ChatRequest(messages=[message], sampling=Sampling, priority=-(2**31))
        async for _ in stub.Chat(chat, timeout=20.0):
            pass
        embed = proxy_pb2.EmbedRequest(inputs=[proxy_pb2.EmbedInput(text="x")], priority=3)
        async for _ in stub.Embed(embed, timeout=20.0):
            pass
    assert [submit.priority for submit in worker.submits] == [-(2**31), 3]


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 0.5, "1", True])
async def test_what_is_no_priority_is_refused_by_name(cluster: FakeCluster, priority: Any) -> None:
    with pytest.raises(APIStatusError) as caught:
        await cluster.ask(TEXT, extra_body={"priority": priority})
    assert caught.value.status_code == 400 and "priority" in caught.value.message
