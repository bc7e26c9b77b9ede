"""The process of an encoder worker, and its direct paths."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from support.channels import connected_channel
from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.engine.encoder_bench import NAMESPACE, Bench, Job, bench, png
from support.engine.transfers import wait_for
from support.processes.cluster import scrape
from support.ranks.groups import children
from support.tracing.spans import kept_tracer, new_context
from support.waiting import until, within
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base.engine_beat import ENGINE_EXIT
from triptych.base.tracing.context import SpanContext, from_bytes, metadata
from triptych.base.types import WorkerInfo
from triptych.ec_connector.base import DirectTransfer, ECTransferConfig
from triptych.ec_connector.connectors.redis import RedisConnectorWorker
from triptych.ec_connector.metadata import Fetch, TransferMetadata
from triptych.models.base import EncoderSide
from triptych.protos import encoder_pb2, encoder_pb2_grpc
from triptych.protos.convert import plan_from_proto, source_from_proto
from triptych.registry.matching import DIRECT
from triptych.registry.registry import Registry
from triptych.store.bulk import Loaded
from triptych.store.embedding_store import EmbeddingStore

_WORKER = """
import asyncio, sys
from triptych.base.log import setup_logging
setup_logging("encoder-0")
from triptych.base.config import EncoderConfig
from triptych.encoder_worker.service import run
model, store = sys.argv[1:]
asyncio.run(run(EncoderConfig(model=model, store=store, threads=1, encoder_data_parallel=2)))
"""


async def _registered(store: EmbeddingStore) -> list[WorkerInfo]:
    """A worker says that it is ready shortly before it registers."""
    while not (workers := await Registry(store).workers()):
        await asyncio.sleep(0.05)
    return workers


@pytest.mark.timeout(240)
async def test_two_ranks_serve_and_a_rank_that_is_killed_ends_the_worker(store, store_url):
    words = (sys.executable, "-c", _WORKER, str(build_checkpoint("qwen3_vl")), store_url)
    process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        while b"ready: encoder" not in (line := await within("the worker", process.stderr.readline())):
            assert line, "the worker has ended"
        [info] = await within("its registration", _registered(store))
        assert info.capacity["tower_credit"] == 2 * 8
        assert info.kind.endswith(" x2 ranks")
        async with connected_channel(info.address) as channel:
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            for seed in range(6):
                job = Job(SimpleNamespace(stub=stub), png(picture(seed)), namespace=info.namespaces[0])
                assert (await (await job.planned()).finished()).WhichOneof("body") == "ready"
        page = await asyncio.to_thread(scrape, f"http://127.0.0.1:{info.capacity['metrics_port']}/metrics")
        assert page["triptych_encoder_ranks"] == 2
        assert page["triptych_encoder_rank_items_total"] == 6
        (rank,) = children(process.pid)
        os.kill(rank, signal.SIGKILL)
        _, log = await within("the end of the worker", process.communicate())
        assert process.returncode == ENGINE_EXIT
        assert b"rank 1 has ended with SIGKILL" in log
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def producer_of(store: EmbeddingStore, key: str) -> SpanContext | None:
    """The context that a reader of the item gets with it."""
    [plan] = await store.look_up([(key, NAMESPACE)])
    assert plan is not None
    loaded = await store.load(plan, lambda nbytes: memoryview(bytearray(nbytes)))
    assert isinstance(loaded, Loaded)
    return from_bytes(loaded.producer)


async def test_an_embedding_carries_the_span_that_computed_it(open_bench, store):
    tracer, kept = kept_tracer()
    parent = new_context(sampled=True)
    async with open_bench(tracer=tracer) as b:
        job = await Job(b, png(picture(1, 96, 64)), metadata=metadata(parent)).planned()
        await job.finished()
        await until(lambda: {"save", "encoder job"} <= {*kept.names()}, "the job's spans")
        server = kept.one("encoder job")
        assert server.parent == parent
        stages = [span for span in kept.spans if span.parent == server.context]
        assert [span.name for span in stages] == ["preprocess", "wait for tower", "tower", "save"]
        assert all(server.start <= span.start <= span.end <= server.end + 0.001 for span in stages), stages
        assert await producer_of(store, job.key) == kept.one("tower").context


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
