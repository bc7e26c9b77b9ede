"""The share of published bytes: half of the store's memory, divided by the proxies that live."""

from __future__ import annotations

from support.fakes.fake_pd import FakePD
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.base.config import ProxyConfig
from triptych.proxy import pool
from triptych.proxy.scaling.upkeep import Upkeep

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
