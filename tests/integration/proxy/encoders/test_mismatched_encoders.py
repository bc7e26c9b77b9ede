"""Which encoder gets a job, and when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from openai import BadRequestError

from support.channels import connected_channel
from support.fakes.fake_encoder import ROWS, FakeEncoder
from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import MODEL, MODEL_KEY, WIDTH, FakeWorker, key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster, raw_post
from support.waiting import until, within
from triptych.base.config import ProxyConfig
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.proxy import pool
from triptych.proxy.auth.keys import KeyLimits, KeyRing
from triptych.proxy.auth.limits import Session
from triptych.proxy.scaling.upkeep import Upkeep

OTHER_KEY, OTHER_NAMESPACE = "c" * 64, "d" * 64


@contextlib.asynccontextmanager
async def joined(cluster: FakeCluster, worker: FakeWorker) -> AsyncIterator[None]:
    """The worker beside those of the cluster, once the proxy knows it."""
    await worker.start()
    await cluster.registry.register(worker.info, term=600.0)
    await until(lambda: (worker.pool, worker.address) in cluster.pool.workers, "the registration")
    if isinstance(worker, FakePD):
        await until(lambda: worker.attaches, "the stream to the PD worker")
    yield
    await worker.kill()


def mismatched(cluster: FakeCluster, reason: str) -> float:
    value = cluster.metrics.registry.get_sample_value("triptych_mismatched_encoders", {"reason": reason})
    assert value is not None
    return value


async def answers(cluster: FakeCluster, *names: str) -> None:
    for name in names:
        reply = await cluster.ask(user("?", picture(name)))
        assert reply.choices[0].message.content == whole_text(8)


async def test_an_encoder_of_another_key_gets_no_jobs_until_a_pd_worker_of_its_key_is_there(store, caplog):
    async with FakeCluster(store) as cluster:
        foreign, new = FakeEncoder(store), FakePD()
        foreign.model_key = new.model_key = OTHER_KEY
        foreign.namespace = OTHER_NAMESPACE
        with caplog.at_level(logging.WARNING):
            async with joined(cluster, foreign):
                await answers(cluster, "one", "two", "three")
                assert (len(foreign.jobs), len(cluster.encoders[0].jobs)) == (0, 3)
                assert mismatched(cluster, "model_key") == 1
                async with joined(cluster, FakeEncoder(store)):
                    pass  # the registry has changed twice: what is known is not logged again
                (line,) = [r.getMessage() for r in caplog.records if foreign.address in r.getMessage()]
                for word in (MODEL_KEY[:12], OTHER_KEY[:12], OTHER_NAMESPACE[:12], "--model-revision"):
                    assert word in line
                # The other half of a rolling update: from here on both versions are served.
                async with joined(cluster, new):
                    await until(lambda: mismatched(cluster, "model_key") == 0, "the match")
                    await answers(cluster, "four")
                    assert [job.namespace for job in foreign.jobs] == [OTHER_NAMESPACE]
        await cluster.at_rest()


async def test_with_only_a_wrong_encoder_pictures_wait_within_their_deadline_and_text_goes_on(store):
    async with FakeCluster(store, encoders=0, pd_workers=0) as cluster:
        pd_worker, wrong = FakePD(), FakeEncoder(store)
        pd_worker.row_width, wrong.row_width = WIDTH, WIDTH + 1
        async with joined(cluster, pd_worker), joined(cluster, wrong):
            assert await cluster.stream([{"role": "user", "content": "count"}]) == whole_text(8)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await ask_within(cluster, "one", 1.5)
            assert error.value.code() in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            )
            assert not wrong.jobs
        await cluster.at_rest()


POISON = picture("poison")


@pytest.mark.parametrize("encoders", [1, 2])
@pytest.mark.parametrize("stage", ["plan", "tower"])
async def test_a_picture_that_ends_three_encoders_is_refused_and_the_others_go_on(store, encoders, stage):
    async with FakeCluster(store, encoders=encoders) as cluster:
        for encoder in cluster.encoders:
            encoder.ends_at[key_of(POISON)] = stage
        bad = asyncio.create_task(cluster.ask(user("?", POISON)))
        pictures = asyncio.gather(*(cluster.stream(user("?", picture(f"p{i}"))) for i in range(6)))
        assert await cluster.stream([{"role": "user", "content": "count"}]) == whole_text(8)
        with pytest.raises(BadRequestError, match="3 encoder workers ended") as caught:
            await bad
        assert caught.value.param == "messages[0].content[0].image_url.url"
        assert sum(len(encoder.restarts) for encoder in cluster.encoders) == 3
        assert await pictures == [whole_text(8)] * 6
        await cluster.at_rest()


async def test_the_items_that_an_encoder_loses_make_one_line(cluster, caplog):
    encoder = cluster.encoders[0]
    encoder.gate.clear()
    asked = asyncio.create_task(cluster.ask(user("?", *(picture(f"p{i}") for i in range(4)))))
    await until(lambda: len(encoder.media) == 4)
    with caplog.at_level(logging.INFO, "triptych.proxy.encoders.job_runner"):
        await encoder.kill()
        await until(lambda: "elsewhere" in caplog.text)
        encoder.gate.set()
        await encoder.start()
        await asked
    first = next(message for message in caplog.messages if "elsewhere" in message)
    assert f"{encoder.address}: 4 (" in first


async def ask_within(cluster: FakeCluster, name: str, seconds: float) -> None:
    """A request over gRPC with a timeout of its own."""
    parts = [proxy_pb2.ChatPart(image=picture(name))]
    request = proxy_pb2.ChatRequest(
        messages=[proxy_pb2.ChatMessage(role="user", parts=parts)],
        sampling=common_pb2.SamplingParams(max_tokens=2),
        timeout=seconds,
    )
    async with connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
        async for _ in stub.Chat(request):
            pass


async def test_a_request_with_a_short_timeout_is_encoded_before_earlier_ones_with_long_ones(store):
    async with FakeCluster(store, request_timeout=300.0) as cluster:
        encoder = cluster.encoders[0]
        encoder.tower.clear()
        asked = []
        for number in range(4):  # the first two take the encoder's tower credit
            asked.append(asyncio.create_task(cluster.ask(user("?", picture(f"long {number}")))))
            await until(lambda: cluster.admitted == len(asked), "a PD worker's room")
        await until(lambda: encoder.runs == 2, "the tower is full")
        urgent = asyncio.create_task(ask_within(cluster, "urgent", 60.0))
        await until(lambda: cluster.admitted == 5, "a PD worker's room for the last")
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
