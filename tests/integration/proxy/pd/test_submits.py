"""Submits that are answered late, or whose calls break: asked about, never repeated as other attempts."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from support.fakes.fake_workers import user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.hostile.two_tenants import A, B, two_tenants
from support.waiting import until
from triptych.proxy.pd import link as link_module
from triptych.proxy.pd.window import ALONE, SHARED

TEXT = user("count")
SHORT = 0.05


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CALL_TIMEOUT", SHORT)
    monkeypatch.setattr(link_module, "REPEAT_PAUSES", (SHORT,) * 3)


async def streaming(cluster: FakeCluster) -> asyncio.Task[str]:
    """A stream whose first tokens have come and whose next ones wait."""
    for worker in cluster.pd_workers:
        worker.pause_at = 4
    asked = asyncio.create_task(cluster.stream(TEXT, max_tokens=12))
    await until(lambda: cluster.received == 4, "the first tokens")
    for worker in cluster.pd_workers:
        worker.pause_at = None
    return asked


async def test_a_submit_that_is_answered_late_is_not_repeated_and_breaks_nobodys_stream(cluster: FakeCluster):
    worker, other = cluster.pd_workers[0], await streaming(cluster)
    worker.door.clear()
    late = asyncio.create_task(cluster.stream(TEXT))
    await until(lambda: len(worker.submits) == 2, "the Submit")
    long_after = time.monotonic() + 10 * SHORT
    await until(lambda: time.monotonic() > long_after, "many times what other calls have")
    assert [submit.attempt for submit in worker.submits] == [1, 1]
    assert len(worker.attaches) == 1, "the stream of all was opened again"
    worker.door.set()
    worker.gate.set()
    assert (await late, await other) == (whole_text(8), whole_text(12))
    assert [submit.attempt for submit in worker.submits] == [1, 1]
    await cluster.at_rest()


async def test_a_submit_whose_call_breaks_is_sent_again_as_the_same_attempt(cluster: FakeCluster):
    worker, other = cluster.pd_workers[0], await streaming(cluster)
    worker.breaks = 2
    worker.admission.clear()
    asked = asyncio.create_task(cluster.stream(TEXT))
    await until(lambda: len(worker.submits) == 4, "the first Submit, and one call after each that broke")
    worker.admission.set()
    worker.gate.set()
    assert (await asked, await other) == (whole_text(8), whole_text(12))
    assert {submit.attempt for submit in worker.submits} == {1}
    assert len(worker.attaches) == 1
    await cluster.at_rest()


async def test_a_worker_of_a_release_that_takes_no_attempt_twice_gets_the_next_one(cluster: FakeCluster):
    [worker] = cluster.pd_workers
    worker.takes_twice, worker.breaks = False, 1
    worker.admission.clear()
    asked = asyncio.create_task(cluster.stream(TEXT))
    await until(lambda: len(worker.submits) == 3, "the call that broke, the one after it, the next attempt")
    worker.admission.set()
    assert await asked == whole_text(8)
    assert [submit.attempt for submit in worker.submits] == [1, 1, 2]
    await cluster.at_rest()


async def test_a_worker_whose_submits_always_break_has_its_request_taken_elsewhere(store):
    async with FakeCluster(store, pd_workers=2) as cluster:
        for worker in cluster.pd_workers:
            worker.admission.clear()
            worker.breaks = 4
        asked = asyncio.create_task(cluster.stream(TEXT))
        await until(lambda: all(worker.submits for worker in cluster.pd_workers), "both workers")
        for worker in cluster.pd_workers:
            worker.admission.set()
        assert await asked == whole_text(8)
        assert [len(worker.attaches) for worker in cluster.pd_workers] == [1, 1]
        await cluster.at_rest()
        await until(lambda: not any(worker.requests for worker in cluster.pd_workers), "what was taken twice")


async def test_an_unanswered_submit_of_a_worker_that_is_given_up_goes_on_elsewhere(store):
    async with FakeCluster(store, pd_workers=2) as cluster:
        for worker in cluster.pd_workers:
            worker.door.clear()
        asked = asyncio.create_task(cluster.stream(TEXT))
        await until(lambda: any(worker.submits for worker in cluster.pd_workers), "the Submit")
        first, second = sorted(cluster.pd_workers, key=lambda worker: -len(worker.submits))
        second.door.set()
        link = cluster.dispatcher._router.links[first.address]
        link.set_aside = True  # as the watch of its stream does
        link.give_up()
        assert await asked == whole_text(8)
        assert (len(first.submits), second.submits[-1].attempt) == (1, 2)
        assert not link._unanswered
        first.door.set()
        await cluster.at_rest()


async def test_no_more_submits_than_the_window_are_unanswered_and_all_are_answered(store, monkeypatch):
    monkeypatch.setattr(link_module, "ALONE", replace(ALONE, first=4.0))
    async with FakeCluster(store) as cluster:
        [worker] = cluster.pd_workers
        worker.door.clear()
        asked = [asyncio.create_task(cluster.stream(TEXT)) for _ in range(12)]
        await until(lambda: cluster.dispatcher._router.load == (12, 8), "eight that wait at the proxy")
        await until(lambda: len(worker.submits) == 4, "as many Submits as the window has room for")
        asked[0].cancel()
        worker.door.set()
        assert await asyncio.gather(*asked[1:]) == [whole_text(8)] * 11
        await cluster.at_rest()


async def test_a_client_that_leaves_frees_its_place_among_the_unanswered(store, monkeypatch):
    monkeypatch.setattr(link_module, "ALONE", replace(ALONE, first=1.0))
    async with FakeCluster(store) as cluster:
        [worker] = cluster.pd_workers
        worker.door.clear()
        leaves = asyncio.create_task(cluster.stream(TEXT))
        await until(lambda: len(worker.submits) == 1, "the first Submit")
        stays = asyncio.create_task(cluster.stream(TEXT))
        await until(lambda: cluster.dispatcher._router.load == (2, 1), "one that waits at the proxy")
        leaves.cancel()
        await until(lambda: len(worker.submits) == 2, "the second Submit")
        worker.door.set()
        assert await stays == whole_text(8)
        await cluster.at_rest()


async def test_a_tenant_with_nothing_unanswered_waits_for_nobodys_submits(store, tmp_path, monkeypatch):
    for name in ("ALONE", "SHARED"):
        monkeypatch.setattr(link_module, name, replace(ALONE, first=4.0))
    async with AsyncExitStack() as stack:
        tenants = await two_tenants(store, tmp_path, stack)
        [worker] = tenants.cluster.pd_workers
        worker.door.clear()
        flood = [tenants.spawn(tenants.small_chat(A)) for _ in range(12)]
        await until(lambda: len(worker.submits) == 4, "as many Submits as the window has room for")
        asked = [asyncio.create_task(tenants.small_chat(B)) for _ in range(3)]
        await until(lambda: len(worker.submits) == 5, "the first Submit of another tenant")
        await until(lambda: tenants.cluster.dispatcher._router.load == (15, 10), "all that wait")
        assert [submit.tenant for submit in worker.submits[:4]] == [worker.submits[0].tenant] * 4
        assert worker.submits[4].tenant != worker.submits[0].tenant
        worker.door.set()
        assert await asyncio.gather(*asked, *flood) == [200] * 15
        await tenants.cluster.at_rest()


async def test_beside_another_tenant_fewer_submits_of_a_crowd_are_unanswered(store, tmp_path, monkeypatch):
    """The other one's next Submit comes behind those at the worker, which answers one after another."""
    monkeypatch.setattr(link_module, "SHARED", replace(SHARED, first=4.0))
    async with AsyncExitStack() as stack:
        tenants = await two_tenants(store, tmp_path, stack)
        [worker] = tenants.cluster.pd_workers
        assert await tenants.small_chat(A) == await tenants.small_chat(B) == 200
        worker.door.clear()
        flood = [tenants.spawn(tenants.small_chat(A)) for _ in range(12)]
        router = tenants.cluster.dispatcher._router
        await until(lambda: router.load == (12, 8), "eight that wait at the proxy")
        await until(lambda: len(worker.submits) == 6, "four Submits of the crowd")
        worker.door.set()
        assert await asyncio.gather(*flood) == [200] * 12
        await tenants.cluster.at_rest()
