"""When a picture is encoded, before whom, on whose account and with what share of the store."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from support.fakes.fake_encoder import ROWS
from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import MODEL, key_of, picture, user
from support.fakes.proxy_fakes import FakeCluster, raw_post
from support.waiting import until, within
from triptych.base.config import ProxyConfig
from triptych.base.rpc.channels import make_channel
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.proxy import pool
from triptych.proxy.auth.keys import KeyLimits, KeyRing
from triptych.proxy.auth.limits import Session
from triptych.proxy.scaling.upkeep import Upkeep


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


async def test_a_picture_alone_is_encoded_before_its_pd_worker_has_admitted_it(cluster: FakeCluster):
    encoder, pd = cluster.encoders[0], cluster.pd_workers[0]
    pd.admission.clear()
    asked = asyncio.create_task(cluster.ask(user("?", picture("alone"))))
    await until(lambda: encoder.runs == 1, "its run")
    pd.admission.set()
    await within("the reply", asked)
    assert encoder.runs == 1


async def test_a_picture_beside_another_request_waits_for_memory_at_its_pd_worker(cluster: FakeCluster):
    encoder, pd = cluster.encoders[0], cluster.pd_workers[0]
    pd.gate.clear()
    text = asyncio.create_task(cluster.ask(user("only text")))
    await until(lambda: len(pd.submits) == 1, "the text at a PD worker")
    pd.admission.clear()
    asked = asyncio.create_task(cluster.ask(user("?", picture("beside"))))
    await until(lambda: len(pd.submits) == 2, "the picture's request at a PD worker")
    assert encoder.runs == 0
    pd.admission.set()
    pd.gate.set()
    await within("both replies", asyncio.gather(text, asked))
    assert encoder.runs == 1


KEY = "tk-charged-0123456789"
HEADERS = {"Authorization": f"Bearer {KEY}"}


def body(name: str) -> bytes:
    return json.dumps({"model": MODEL, "messages": user("x", picture(name)), "max_tokens": 1}).encode()


async def test_a_request_that_leaves_before_a_pd_worker_took_it_pays_for_its_encoder_work(store):
    keys = KeyRing(KEY, "", KeyLimits(tokens_per_minute=1))
    async with FakeCluster(store, keys=keys) as cluster:
        cluster.pd_workers[0].admission.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
        sent = body("cat")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        writer.write(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        await until(lambda: cluster.pd_workers[0].submits, "the item is planned")
        writer.close()
        await writer.wait_closed()
        await cluster.at_rest()
        cluster.pd_workers[0].admission.set()
        status, _, reply = await raw_post(cluster.port, body("cat"), HEADERS)
        assert status == 429
        assert b"tokens-per-minute" in reply


async def test_what_the_store_has_costs_its_prompt_tokens_alone(store, monkeypatch):
    charged: list[int] = []
    monkeypatch.setattr(Session, "charge", lambda session, tokens: charged.append(tokens))
    async with FakeCluster(store, keys=KeyRing(KEY, "", KeyLimits())) as cluster:
        for _ in range(2):
            assert (await raw_post(cluster.port, body("cat"), HEADERS))[0] == 200
    assert charged == [3 + 1 + ROWS, 3 + 1]


MEMORY = 100 << 20


async def test_the_share_is_divided_by_live_proxies_and_whole_again_when_one_has_gone(store, monkeypatch):
    monkeypatch.setattr(pool, "POLL_SECONDS", 0.05)
    async with FakeCluster(store, encoders=0) as cluster:
        upkeep = Upkeep(ProxyConfig(store_memory=MEMORY), store, cluster.pool, cluster.dispatcher)
        table = cluster.dispatcher.jobs.table
        await upkeep.poll()
        assert table.share == MEMORY // 2
        await cluster.registry.declare_proxy("second", 600.0)
        await cluster.registry.declare_proxy("third", 600.0)
        await until(lambda: cluster.pool.proxies == 3)
        await upkeep.poll()
        assert table.share == MEMORY // 6
        # A killed proxy declares itself no more: its term runs out.
        await cluster.registry.declare_proxy("second", -1.0)
        await cluster.registry.declare_proxy("third", -1.0)
        await until(lambda: cluster.pool.proxies == 1)
        await upkeep.poll()
        assert table.share == MEMORY // 2


async def test_requests_are_whole_where_a_pd_worker_loads_them_so(store):
    async with FakeCluster(store, pd_workers=0) as cluster:
        assert not cluster.dispatcher.jobs.table.whole_requests
        worker = FakePD()
        worker.whole_requests = True
        await worker.start()
        try:
            await cluster.registry.register(worker.info, term=600.0)
            await until(lambda: cluster.dispatcher.jobs.table.whole_requests)
        finally:
            await worker.kill()
