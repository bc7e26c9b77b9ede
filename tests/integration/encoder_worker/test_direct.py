"""Jobs whose PD workers read the embedding at the encoder: answered before, and without, the save."""

from __future__ import annotations

import asyncio

from support.data.pictures import picture
from support.engine.encoder_bench import NAMESPACE, Bench, Job, bench, png
from support.engine.transfers import wait_for
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.ec_connector.base import DirectTransfer, ECTransferConfig
from triptych.ec_connector.connectors.redis import RedisConnectorWorker
from triptych.ec_connector.metadata import Fetch, TransferMetadata
from triptych.models.base import EncoderSide
from triptych.protos import encoder_pb2
from triptych.protos.convert import plan_from_proto, source_from_proto
from triptych.registry.matching import DIRECT
from triptych.store.embedding_store import EmbeddingStore


async def path_of(ready: encoder_pb2.ItemReady) -> str:
    """The path by which a PD worker without a store reads the item."""
    plan = plan_from_proto(ready.plan)
    config = ECTransferConfig(store_url="unix:///none", ec_role="consumer", direct=DirectTransfer())
    connector = RedisConnectorWorker(config)
    fetches = (Fetch(plan, 1, source_from_proto(ready.source)),)
    connector.start_load_caches(TransferMetadata(1, fetches=fetches), {})
    try:
        out = await asyncio.to_thread(wait_for, connector, lambda out: out.fetched or out.failed)
        return out.paths.get(plan.mm_hash, "")
    finally:
        await asyncio.to_thread(connector.shutdown)


def direct(b: Bench, number: int, **changes: object) -> Job:
    return Job(b, png(picture(number)), changes={"direct": True, **changes})


async def test_a_new_item_is_read_at_the_encoder_while_the_store_is_away(encoder, server, own_store):
    async with bench(encoder, own_store, server.url) as b:
        assert b.worker.info(0).capacity[DIRECT] == 1
        server.stop()
        b.worker.jobs.reaches_store = lambda: False
        assert b.worker.direct is not None
        b.worker.direct.reaches_store = lambda: False
        ready = (await (await direct(b, 1).planned()).finished()).ready
        assert await path_of(ready) == "shm"
        b.worker.jobs.fail_all()
        await b.until("triptych_encoder_jobs", 0)
        again = (await (await direct(b, 1).planned()).finished()).ready
        assert (again.source, b.tower.batches) == (ready.source, [1])


async def test_the_embedding_is_saved_after_the_answer(encoder, server, own_store):
    async with bench(encoder, own_store, server.url) as b:
        job = await direct(b, 2).planned()
        ready = (await job.finished()).ready
        assert not ready.already_stored
        await b.until("triptych_encoder_jobs", 0)
        assert await own_store.look_up([(ready.plan.mm_hash, NAMESPACE)]) == [plan_from_proto(ready.plan)]
        assert b.metric("triptych_encoder_leases_held") == 0


async def test_a_job_of_another_proxy_waits_for_the_save_where_its_pd_workers_need_it(
    encoder: EncoderSide, server: EmbeddedStore, own_store: EmbeddingStore
) -> None:
    async with bench(encoder, own_store, server.url) as b:
        server.stop()
        b.tower.open.clear()
        first, second = await direct(b, 3).planned(), await Job(b, png(picture(3))).planned()
        await first.run()
        await second.run()
        b.tower.open.set()
        assert (await first.last()).WhichOneof("body") == "ready"
        assert b.metric("triptych_encoder_jobs") == 1
        server.start()
        ready = (await second.last()).ready
        assert b.tower.batches == [1]
        assert await own_store.look_up([(ready.plan.mm_hash, NAMESPACE)]) == [plan_from_proto(ready.plan)]


async def test_with_the_store_alone_nothing_is_served(encoder, server, own_store):
    async with bench(encoder, own_store, server.url, ec_transfer="store") as b:
        assert b.worker.info(0).capacity[DIRECT] == 0
        ready = (await (await direct(b, 4).planned()).finished()).ready
        assert not ready.HasField("source")
        plan = plan_from_proto(ready.plan)
        assert await own_store.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
