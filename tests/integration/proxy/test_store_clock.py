"""Embeddings that a jump of the store's clock has expired are encoded again, and nobody is refused for it."""

from __future__ import annotations

import asyncio
import time

import pytest

from support.fakes.fake_workers import key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.store import scripts

PICTURES = 8
SHIFT = "test:shift"


@pytest.fixture
def clock_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's clock is ahead by what SHIFT says, as after somebody has set it."""
    time_of = "local time = redis.call('TIME')"
    assert time_of in scripts.EPOCH
    shifted = f"{time_of}\ntime[1] = time[1] + (redis.call('GET', '{SHIFT}') or 0)"
    monkeypatch.setattr(scripts, "EPOCH", scripts.EPOCH.replace(time_of, shifted))


async def lose_all(cluster: FakeCluster, shift: int) -> None:
    """Answers a request whose embeddings, found in the store, are gone when its PD worker loads them."""
    pictures = [picture(f"p{number}") for number in range(PICTURES)]
    worker = cluster.pd_workers[0]
    assert await cluster.stream(user("first", *pictures)) == whole_text(8)
    worker.admission.clear()
    asked = asyncio.create_task(cluster.stream(user("second", *pictures)))
    await until(lambda: len(worker.submits) == 2, "the second request")
    await cluster.store.control.execute("SET", SHIFT, shift)
    worker.missing = {key_of(media): [""] for media in pictures}
    worker.admission.set()
    assert await asked == whole_text(8)
    assert cluster.metrics.re_encodes._value.get() == PICTURES


@pytest.mark.parametrize("shift", [86_400, -86_400])
async def test_losses_after_a_jump_of_the_clock_are_no_pressure(store, clock_by_key, shift):
    async with FakeCluster(store) as cluster:
        await lose_all(cluster, shift)
        assert not cluster.dispatcher.backpressure.refuses_media(time.monotonic())
        assert await cluster.stream(user("third", picture("new"))) == whole_text(8)
        await cluster.at_rest()


async def test_the_same_losses_under_an_even_clock_are_pressure(store, clock_by_key):
    async with FakeCluster(store) as cluster:
        await lose_all(cluster, 0)
        assert cluster.dispatcher.backpressure.refuses_media(time.monotonic())
