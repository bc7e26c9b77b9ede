"""A pool at zero: requests with media wait for the worker that they ask for, and texts do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from support.fakes.fake_encoder import FakeEncoder
from support.fakes.fake_workers import picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until, within
from triptych.base.config import ScalingConfig
from triptych.base.scaling import ScalingDecision
from triptych.proxy.scaling import autoscaler as autoscaler_module
from triptych.proxy.scaling.autoscaler import Autoscaler, start_scaling
from triptych.registry.scaling import ScalingBoard
from triptych.store.embedding_store import EmbeddingStore

RULES = ScalingConfig(max_encoders=3)


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler_module, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(autoscaler_module, "LEARN_SECONDS", 0.5)


@contextlib.asynccontextmanager
async def scaling(cluster: FakeCluster, config: ScalingConfig = RULES) -> AsyncIterator[Autoscaler]:
    async with contextlib.AsyncExitStack() as stack:
        started = await start_scaling(
            config, cluster.store, cluster.pool, cluster.dispatcher, cluster.metrics, "proxy-test", stack
        )
        assert started is not None
        yield started


async def joins(cluster: FakeCluster) -> FakeEncoder:
    """An encoder that starts and registers now."""
    encoder = FakeEncoder(cluster.store)
    encoder.token, encoder.modality = cluster.pd_workers[0].token, "image"
    encoder.register = cluster._register
    cluster.encoders.append(encoder)
    await encoder.start()
    return encoder


async def decided(board: ScalingBoard, workers: int) -> ScalingDecision:
    async with asyncio.timeout(45):
        while True:
            decision = await board.decision("encoder")
            if decision is not None and decision.workers == workers:
                return decision
            await asyncio.sleep(0.01)


async def test_the_first_media_request_asks_for_an_encoder_and_is_answered_when_it_has_joined(store):
    board = ScalingBoard(store)
    async with FakeCluster(store, encoders=0) as cluster, scaling(cluster):
        assert not (await decided(board, 0)).active
        request = asyncio.create_task(cluster.ask(user("what is it?", picture("a"))))
        assert (await decided(board, 1)).active
        reply = await within("a text beside it", cluster.ask(user("no picture")))
        assert reply.choices[0].message.content == whole_text(8)
        assert not request.done()
        encoder = await joins(cluster)
        answer = await within("the answer", request)
        assert answer.choices[0].message.content == whole_text(8)
        assert len(encoder.jobs) == 1
        await cluster.at_rest()
        # Before an encoder has gone for good the pool must have been idle for the whole window.
        assert (await decided(board, 1)).active


async def test_a_request_that_gives_up_waiting_asks_for_nothing_any_more(store: EmbeddingStore) -> None:
    async with FakeCluster(store, encoders=0) as cluster, scaling(cluster):
        request = asyncio.create_task(cluster.ask(user("what is it?", picture("a"))))
        await until(lambda: cluster.pool.unbound.total() == 1, "the request that waits")
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: cluster.pool.unbound.total() == 0, "its end")


async def test_the_first_item_of_an_empty_pool_is_seen_before_the_next_look(store: EmbeddingStore) -> None:
    async with FakeCluster(store, encoders=0) as cluster, scaling(cluster) as autoscaler:
        await until(lambda: autoscaler.decision("encoder") is not None, "the first decision")
        seen: list[bool] = []

        def listen() -> None:
            decision = autoscaler.decision("encoder")
            assert decision is not None
            seen.append(decision.active)

        autoscaler.subscribe(listen)
        asked = asyncio.create_task(cluster.ask(user("what is it?", picture("a"))))
        await until(lambda: seen == [True], "the change by the first item")
        await joins(cluster)
        await within("the answer", asked)


async def test_an_item_costs_its_part_of_the_batch_or_all_of_it_where_the_worker_does_not_tell(store):
    for work, cost in ((0.0, 0.5), (0.125, 0.125)):
        async with FakeCluster(store) as cluster:
            cluster.encoders[0].work_seconds = work
            await cluster.ask(user("what is it?", picture(f"worth {work}")))
            assert cluster.dispatcher.jobs.model.work(None) == cost
