"""KEDA's loops drive real registrations from 0 to 1, N and back to 0, with real proxies and a real store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from openai import AsyncOpenAI

from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import MODEL, picture, user, whole_text
from support.keda.fleet import EncoderFleet
from support.keda.hpa import Behavior
from support.keda.operator import KedaOperator, ScaledObject
from support.keda.stubs import ScalerStub, message, scaled_object
from support.processes.cluster import free_port
from support.processes.proxy_process import started_proxy
from support.waiting import until, within
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.embedding_store import EmbeddingStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

#: KEDA's seconds in one of ours: the HPA looks every second.
SPEED = 15.0
MOST = 4
#: Of the towers; and until a pod has registered.
TOWER_SECONDS, COLD_START = 0.2, 0.5
RULES = ("--min-encoders", "0", "--max-encoders", str(MOST), "--encoder-slo", "1", "--scale-window", "3")
ENCODERS = {"pool": "encoder", "scalerAddress": "proxy:8002"}
#: As docs/autoscaling.md recommends.
SPEC = ScaledObject(
    ENCODERS,
    most=MOST,
    polling_interval=5.0,
    cooldown_period=5.0,
    behavior=Behavior(down_stabilization=0.0, up_pods=MOST),
)


@contextlib.asynccontextmanager
async def pd_worker(store: EmbeddingStore) -> AsyncIterator[FakePD]:
    worker = FakePD()
    await worker.start()
    await Registry(store).register(worker.info, term=600.0)
    yield worker
    await worker.kill()


@contextlib.asynccontextmanager
async def proxy(store_url: str, folder: Path, name: str) -> AsyncIterator[tuple[AsyncOpenAI, aio.Channel]]:
    """A proxy's client and a channel to its scaler."""
    port = free_port()
    words = (*RULES, "--scaler-port", str(port))
    async with (
        started_proxy(store_url, folder / f"{name}.log", *words) as (_, http_port, _),
        aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        AsyncOpenAI(
            base_url=f"http://127.0.0.1:{http_port}/v1", api_key="-", max_retries=0, timeout=120.0
        ) as client,
    ):
        yield client, channel


@contextlib.asynccontextmanager
async def fleet(store: EmbeddingStore) -> AsyncIterator[EncoderFleet]:
    made = EncoderFleet(store, cold_start=COLD_START, tower_seconds=TOWER_SECONDS)
    yield made
    await within("the end of all pods", made.close())


async def ask(client: AsyncOpenAI, *names: str) -> str:
    """The answer to a question about these pictures."""
    messages: Any = user("?", *(picture(name) for name in names))
    reply = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
    return str(reply.choices[0].message.content)


async def burst(client: AsyncOpenAI, name: str, requests: int) -> None:
    """Requests of four pictures each, at once; every one is answered."""
    asked = (ask(client, *(f"{name}-{index}-{item}" for item in range(4))) for index in range(requests))
    assert set(await within("all answers", asyncio.gather(*asked))) == {whole_text(8)}


async def answered(stub: Any) -> tuple[float, bool]:
    """(desired workers, active) as this proxy says; waits while it knows nothing."""
    reference = scaled_object(ENCODERS)
    deadline = asyncio.get_running_loop().time() + 30.0
    while True:
        try:
            request = message("GetMetricsRequest")(scaledObjectRef=reference, metricName="")
            (value,) = (await stub.GetMetrics(request, timeout=10.0)).metricValues
            return float(value.metricValueFloat), bool((await stub.IsActive(reference, timeout=10.0)).result)
        except aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert asyncio.get_running_loop().time() < deadline, "no decision comes into force"
            await asyncio.sleep(0.1)


async def test_bursts_take_the_pool_from_zero_to_many_and_back_and_none_is_lost(
    store: EmbeddingStore, store_url: str, tmp_path: Path
) -> None:
    async with (
        pd_worker(store),
        proxy(store_url, tmp_path, "proxy") as (client, channel),
        fleet(store) as pods,
    ):
        assert await answered(ScalerStub(channel)) == (0.0, False)
        async with KedaOperator(SPEC, pods, channel, SPEED).running() as operator:
            for number in range(2):
                begun = len(pods.steps)
                await burst(client, f"burst-{number}", 12)
                await until(lambda: pods.replicas == 0, "the way back to zero", 90.0)
                steps = [0, *pods.steps[begun:]]
                assert steps[1] == 1, "KEDA scales 0 -> 1"
                assert max(steps) >= 3
                turns = sum(
                    (b > a) is not (c > b) for a, b, c in zip(steps, steps[1:], steps[2:], strict=False)
                )
                assert turns <= 2, steps
            # The first worker of each burst came by the push, and only KEDA goes to zero.
            assert [entry for entry in operator.pushed if entry] == [True, True]
            assert {who for _, who, replicas in operator.log if replicas == 0} == {"keda"}


async def test_the_first_picture_is_pushed_without_any_poll(
    store: EmbeddingStore, store_url: str, tmp_path: Path
) -> None:
    async with (
        pd_worker(store),
        proxy(store_url, tmp_path, "proxy") as (client, channel),
        fleet(store) as pods,
    ):
        stub: Any = ScalerStub(channel)
        assert await answered(stub) == (0.0, False)
        stream = stub.StreamIsActive(scaled_object(ENCODERS))
        assert (await within("the state", stream.read())).result is False
        # Text wants no encoder.
        reply: Any = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "count"}], max_tokens=8
        )
        assert reply.choices[0].message.content == whole_text(8)
        asked = asyncio.create_task(ask(client, "one"))
        assert (await within("the push", stream.read())).result is True
        pods.scale(1)
        assert await within("the answer", asked) == whole_text(8)
        stream.cancel()


async def test_two_proxies_give_one_answer_and_either_may_leave(
    store: EmbeddingStore, store_url: str, tmp_path: Path
) -> None:
    """The work is all with the first one, KEDA asks the second one."""
    async with (
        pd_worker(store),
        proxy(store_url, tmp_path, "second") as (_, second_channel),
        fleet(store) as pods,
    ):
        second: Any = ScalerStub(second_channel)
        async with proxy(store_url, tmp_path, "first") as (client, first_channel):
            first: Any = ScalerStub(first_channel)
            assert await answered(first) == await answered(second) == (0.0, False)
            async with KedaOperator(SPEC, pods, second_channel, SPEED).running():
                asked = asyncio.create_task(burst(client, "burst", 24))
                await until(lambda: pods.replicas >= 2, "workers for the other proxy's work")
                agreed = 0
                while not asked.done():
                    agreed += await answered(first) == await answered(second)
                    await asyncio.sleep(0.2)
                await asked
                assert agreed >= 3
                for stub in (first, second):
                    assert (await answered(stub))[1], "there was work a moment ago"
        # The first one has left with its demand.
        async with KedaOperator(SPEC, pods, second_channel, SPEED).running():
            await until(lambda: pods.replicas == 0, "the way back to zero", 90.0)
        assert await answered(second) == (0.0, False)


async def test_while_the_store_knows_no_decision_the_workers_stay(
    store: EmbeddingStore, store_url: str, tmp_path: Path
) -> None:
    """A flush takes the decisions and all registrations; they come back, and nothing is scaled meanwhile."""
    async with (
        pd_worker(store) as decoder,
        fleet(store) as pods,
        proxy(store_url, tmp_path, "proxy") as (client, channel),
        KedaOperator(SPEC, pods, channel, SPEED).running(),
    ):
        asked = asyncio.create_task(burst(client, "burst", 24))
        await until(lambda: pods.replicas >= 2, "workers")
        await store.control.execute("FLUSHALL")
        await Registry(store).register(decoder.info, term=600.0)
        await asked
        assert pods.replicas >= 1
        await until(lambda: pods.replicas == 0, "the way back to zero", 90.0)
