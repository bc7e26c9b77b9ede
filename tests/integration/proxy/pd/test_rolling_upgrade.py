"""Two live model keys under one served name: the old cluster's workers leave while the new ones come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from support.fakes.fake_encoder import FakeEncoder
from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import MODEL_KEY, NAMESPACE, FakeWorker, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.store.embedding_store import EmbeddingStore

NEW_KEY, NEW_NAMESPACE = "c" * 64, "d" * 64
TEXT = [{"role": "user", "content": "count"}]


@contextlib.asynccontextmanager
async def added(
    cluster: FakeCluster, worker: FakeWorker, key: str, namespace: str = NEW_NAMESPACE
) -> AsyncIterator[None]:
    """The worker beside those of the cluster, once the proxy knows it."""
    worker.model_key, worker.namespace = key, namespace
    await worker.start()
    await cluster.registry.register(worker.info, term=600.0)
    await until(lambda: (worker.pool, worker.address) in cluster.pool.workers)
    if isinstance(worker, FakePD):
        await until(lambda: worker.attaches)
    yield
    await worker.kill()


async def test_text_binds_to_the_newest_key_that_has_a_pd_worker(cluster: FakeCluster) -> None:
    old, new = cluster.pd_workers[0], FakePD()
    assert await cluster.stream(TEXT) == whole_text(8)
    async with added(cluster, new, NEW_KEY):
        assert await cluster.stream(TEXT) == whole_text(8)
    assert [submit.model_key for submit in old.submits] == [MODEL_KEY]
    assert [submit.model_key for submit in new.submits] == [NEW_KEY]
    await until(lambda: len(cluster.pool.serving("pd")) == 1)
    assert await cluster.stream(TEXT) == whole_text(8)
    assert [submit.model_key for submit in old.submits] == [MODEL_KEY] * 2


async def test_a_worker_of_a_version_before_lists_of_tokens_is_read_too(cluster: FakeCluster) -> None:
    for lists in (False, True):
        cluster.pd_workers[0].step_tokens = lists
        assert await cluster.stream(TEXT) == whole_text(8)
    assert cluster.pd_workers[0].attaches[0].reads_step_tokens


async def test_a_request_keeps_its_key_and_resumes_at_a_worker_of_it_only(cluster: FakeCluster) -> None:
    old, new, other = cluster.pd_workers[0], FakePD(), FakePD()
    old.pause_at = 5
    asked = asyncio.create_task(cluster.stream(TEXT, max_tokens=12))
    await until(lambda: cluster.received == 5)
    async with added(cluster, new, NEW_KEY):
        await old.kill()
        await until(lambda: len(cluster.pool.serving("pd")) == 1)
        # There is a worker for others meanwhile, and none for this one.
        assert await cluster.stream(TEXT) == whole_text(8)
        assert not asked.done()
        async with added(cluster, other, MODEL_KEY):
            assert await asked == whole_text(12)
    assert [submit.attempt for submit in new.submits] == [1]
    (resumed,) = other.submits
    assert (resumed.model_key, list(resumed.resume.output_token_ids)) == (
        MODEL_KEY,
        [1000 + index for index in range(5)],
    )


async def test_a_picture_of_the_new_key_is_encoded_by_an_encoder_of_that_key(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        old, new = cluster.encoders[0], FakeEncoder(store)
        async with added(cluster, FakePD(), NEW_KEY):
            asked = asyncio.create_task(cluster.ask(user("?", picture("p"))))
            assert await cluster.stream(TEXT) == whole_text(8)
            assert not old.jobs
            async with added(cluster, new, NEW_KEY):
                assert (await asked).choices[0].message.content == whole_text(8)
        assert ([job.namespace for job in old.jobs], [job.namespace for job in new.jobs]) == (
            [],
            [NEW_NAMESPACE],
        )
        assert NAMESPACE != NEW_NAMESPACE
