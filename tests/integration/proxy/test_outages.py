"""Outages of workers and of the store, and faults of the pool's looks."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
from openai import APIStatusError

from support.fakes.fake_workers import key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.stores.commands import commands
from support.waiting import until
from triptych.proxy import pool
from triptych.proxy.pool import CHECKS_PER_SECOND, health_interval
from triptych.store import control
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

TEXT = [{"role": "user", "content": "count"}]


async def test_media_wait_for_an_encoder_until_the_deadline_and_then_get_503(store: EmbeddingStore) -> None:
    async with FakeCluster(store, request_timeout=1.5) as cluster:
        await cluster.encoders[0].kill()
        with pytest.raises(APIStatusError) as caught:
            await cluster.ask(user("?", picture("p")))
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        await cluster.at_rest()
    async with FakeCluster(store) as cluster:
        await cluster.encoders[0].kill()
        assert await cluster.stream(TEXT) == whole_text(8)
        await cluster.at_rest()


async def test_a_health_check_that_began_before_a_restart_does_not_count_for_the_new_process(cluster, caplog):
    encoder = cluster.encoders[0]
    encoder.health.answers.clear()
    await until(lambda: encoder.health.asked == 1, "a check without an answer")
    encoder.incarnation += 1
    await cluster.registry.register(encoder.info, term=600.0)
    known = cluster.pool.workers["encoder", encoder.address]
    await until(lambda: known.info.incarnation == encoder.info.incarnation, "the new registration")
    encoder.incarnation -= 1  # which `start` counts
    await encoder.kill()
    await encoder.start()
    await until(lambda: encoder.health.checked > 0, "a check of the new process")
    assert "does not answer" not in caplog.text


def cut_off(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy reaches neither the store nor the registry in it, until the patches are undone."""

    async def down(*_: object, **__: object) -> None:
        raise StoreUnavailable("switched off")

    for place, name in ((cluster.store, "look_up"), (cluster.store, "epoch"), (cluster.registry, "poll")):
        monkeypatch.setattr(place, name, down)


async def test_text_goes_on_without_the_store_while_media_get_503_in_time(store, monkeypatch):
    async with FakeCluster(store, store_wait=0.5) as cluster:
        cut_off(cluster, monkeypatch)
        await until(lambda: not cluster.pool.store_ok)
        await cluster.encoders[0].reaches_store(False)
        await until(lambda: cluster.pool.store_lost("encoder"))
        assert await cluster.stream(TEXT) == whole_text(8)
        with pytest.raises(APIStatusError) as caught:
            await cluster.ask(user("?", picture("p")))
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert "store" in caught.value.body["message"]
        await cluster.encoders[0].reaches_store(True)
        ready = await cluster.client._client.get(f"http://127.0.0.1:{cluster.port}/ready")
        assert (ready.status_code, ready.json()["degraded"]) == (200, "store")
        monkeypatch.undo()
        await until(lambda: cluster.pool.store_ok)
        assert (await cluster.ask(user("?", picture("p")))).choices[0].message.content == whole_text(8)


async def test_a_proxy_that_alone_lacks_the_store_has_media_looked_up_and_encoded(cluster, monkeypatch):
    await cluster.ask(user("?", picture("p")))
    cut_off(cluster, monkeypatch)
    await until(lambda: not cluster.pool.store_ok)
    for name in "pq":
        reply = await cluster.ask(user("other text", picture(name)))
        assert reply.choices[0].message.content == whole_text(8)
    assert not cluster.dispatcher.backpressure.refuses_media(time.monotonic())
    # The only proxy that the registry has named serves on.
    ready = await cluster.client._client.get(f"http://127.0.0.1:{cluster.port}/ready")
    assert ready.status_code == 200


async def test_an_encoder_without_the_store_gets_no_job_while_another_has_it(store: EmbeddingStore) -> None:
    async with FakeCluster(store, encoders=2) as cluster:
        cut_off, well = cluster.encoders
        await cut_off.reaches_store(False)
        await until(lambda: len(cluster.pool.reaching("encoder")) == 1)
        for name in "abcd":
            await cluster.ask(user("?", picture(name)))
        assert (len(cut_off.jobs), len(well.jobs)) == (0, 4)


async def test_a_pd_worker_without_the_store_gets_pictures_only_where_no_other_one_is(store):
    async with FakeCluster(store, pd_workers=2, store_wait=60.0) as cluster:
        cut_off, well = cluster.pd_workers
        await cut_off.reaches_store(False)
        await until(lambda: len(cluster.pool.reaching("pd")) == 1)
        for name in "abcd":
            await cluster.ask(user("?", picture(name)))
        assert (len(cut_off.submits), len(well.submits)) == (0, 4)
        await well.reaches_store(False)
        await until(lambda: cluster.pool.store_lost("pd"))
        # It may have the embedding resident, and says so if not.
        reply = await cluster.ask(user("?", picture("a")))
        assert reply.choices[0].message.content == whole_text(8)


async def test_workers_that_a_flush_has_unregistered_stay_in_use_by_their_health(store):
    async with FakeCluster(store) as cluster:
        await store.control.execute("FLUSHALL")
        await until(lambda: not any(worker.registered for worker in cluster.pool.workers.values()))
        reply = await cluster.ask(user("?", picture("p")))
        assert reply.choices[0].message.content == whole_text(8)
        await cluster.encoders[0].kill()
        await until(lambda: len(cluster.pool.workers) == 1)


async def test_a_check_that_a_proxys_end_cuts_short_leaves_no_error_behind(store, caplog) -> None:
    async with FakeCluster(store) as cluster:
        worker = cluster.encoders[0]
        worker.health.answers.clear()
        await until(lambda: worker.health.asked, "a check without an answer")
    gc.collect()
    assert "never retrieved" not in caplog.text


PICTURES = 8
SHIFT = "test:shift"


@pytest.fixture
def clock_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's clock is ahead by what SHIFT says, as after somebody has set it."""
    time_of = "local time = redis.call('TIME')"
    assert time_of in control.EPOCH
    shifted = f"{time_of}\ntime[1] = time[1] + (redis.call('GET', '{SHIFT}') or 0)"
    monkeypatch.setattr(control, "EPOCH", control.EPOCH.replace(time_of, shifted))


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
async def test_losses_after_a_jump_of_the_clock_are_no_pressure(cluster, clock_by_key, shift):
    await lose_all(cluster, shift)
    assert not cluster.dispatcher.backpressure.refuses_media(time.monotonic())
    assert await cluster.stream(user("third", picture("new"))) == whole_text(8)


async def test_the_same_losses_under_an_even_clock_are_pressure(cluster, clock_by_key):
    await lose_all(cluster, 0)
    assert cluster.dispatcher.backpressure.refuses_media(time.monotonic())


def failing(work, failures):
    """The work, which fails so often first as nobody expects; and how often it has failed."""
    failed = []

    async def faulty(*args, **options):
        if len(failed) < failures:
            failed.append(args)
            raise ZeroDivisionError("nobody expects this")
        return await work(*args, **options)

    return faulty, failed


async def test_a_look_at_the_registry_that_fails_is_followed_by_others(store, monkeypatch, caplog):
    async with FakeCluster(store, encoders=2) as cluster:
        poll, failed = failing(cluster.registry.poll, 2)
        monkeypatch.setattr(cluster.registry, "poll", poll)
        await until(lambda: len(failed) == 2, "two failed looks")
        gone = cluster.encoders[1]
        await cluster.registry.withdraw(gone.info)
        await gone.kill()
        await until(lambda: ("encoder", gone.address) not in cluster.pool.workers, "the worker's going")
    assert "the registry could not be read" in caplog.text


async def test_a_health_check_that_fails_by_itself_is_followed_by_others(store, monkeypatch, caplog):
    monkeypatch.setattr(pool, "HEALTH_INTERVAL", 0.05)
    async with FakeCluster(store) as cluster:
        checked = cluster.pd_workers[0].health
        check, failed = failing(cluster.pool._check, 3)
        monkeypatch.setattr(cluster.pool, "_check", check)
        await until(lambda: len(failed) == 3, "three failed checks")
        before = checked.checked
        await until(lambda: checked.checked > before, "further checks")
        assert (await cluster.ask(user("?"))).choices
    assert "could not be checked" in caplog.text


LOOKS = 5


async def test_a_poll_of_the_registry_is_one_command(store, monkeypatch):
    monkeypatch.setattr(pool, "POLL_SECONDS", 60.0)
    async with FakeCluster(store, encoders=2, pd_workers=2) as cluster:
        before = await commands(store)
        for _ in range(LOOKS):
            await cluster.pool.poll()
        spent = await commands(store) - before
        assert spent["eval"] == LOOKS
        # All else is of the scripts, and the same for any number of workers.
        assert sum(spent.values()) - spent["info"] <= 8 * LOOKS
        assert spent["hgetall"] == spent["hvals"] == spent["hget"] == spent["scan"] == 0
        assert len(cluster.pool.workers) == 4


@pytest.mark.parametrize("workers", [1, 2, 16, 17, 100, 1000])
def test_a_proxy_makes_no_more_health_checks_a_second_for_more_workers(workers: int) -> None:
    interval = health_interval(workers)
    assert interval >= pool.HEALTH_INTERVAL
    assert workers / interval <= CHECKS_PER_SECOND


async def test_a_worker_whose_registration_is_gone_is_checked_at_once_however_many_workers_there_are(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "health_interval", lambda workers: 3600.0)
    async with FakeCluster(store, encoders=2) as cluster:
        first, second = cluster.encoders
        await until(lambda: first.health.checked == second.health.checked == 1, "the first checks")
        await first.kill()
        await cluster.registry.withdraw(first.info)
        await until(lambda: ("encoder", first.address) not in cluster.pool.workers, "the worker's going")
        assert second.health.checked == 1


async def test_all_workers_are_checked_at_once_when_the_store_goes_away(store, monkeypatch):
    monkeypatch.setattr(pool, "health_interval", lambda workers: 3600.0)

    async def down(*_, **__):
        raise StoreUnavailable("switched off")

    async with FakeCluster(store, encoders=2) as cluster:
        workers = (*cluster.encoders, *cluster.pd_workers)
        await until(lambda: all(worker.health.checked == 1 for worker in workers), "the first checks")
        monkeypatch.setattr(cluster.registry, "poll", down)
        await until(
            lambda: all(worker.health.checked > 1 for worker in workers), "checks by the proxy itself"
        )
