"""Workers that answer no health check for a while: others get what they have before they count as lost."""

from __future__ import annotations

import asyncio

from support.fakes.fake_workers import picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.store.embedding_store import EmbeddingStore

TEXT = [{"role": "user", "content": "count"}]
#: No worker counts as lost in the time of a test.
NEVER = 600.0


async def test_a_silent_encoders_items_are_encoded_by_another_one(store: EmbeddingStore) -> None:
    async with FakeCluster(store, encoders=2, health_timeout=NEVER) as cluster:
        silent, well = cluster.encoders
        for encoder in cluster.encoders:
            encoder.gate.clear()
        asked = [asyncio.create_task(cluster.ask(user("?", picture(name)))) for name in "abcdef"]
        await until(lambda: silent.jobs and well.jobs, "jobs at both encoders")
        silent.health.answers.clear()
        well.gate.set()
        for reply in await asyncio.gather(*asked):
            assert reply.choices[0].message.content == whole_text(8)
        assert len(cluster.pool.serving("encoder")) == 2


async def test_a_silent_pd_workers_requests_go_on_at_another_one(store: EmbeddingStore) -> None:
    async with FakeCluster(store, pd_workers=2, health_timeout=NEVER) as cluster:
        for worker in cluster.pd_workers:
            worker.pause_at = 3
        asked = asyncio.create_task(cluster.stream(TEXT))
        await until(lambda: any(not worker.gate.is_set() for worker in cluster.pd_workers), "a stream")
        silent, well = sorted(cluster.pd_workers, key=lambda worker: worker.gate.is_set())
        well.pause_at = None
        silent.health.answers.clear()
        assert await asked == whole_text(8)
        silent.health.answers.set()
        await until(lambda: len(cluster.pool.well("pd")) == 2, "its answer")
        silent.gate.set()
        await cluster.at_rest()


async def test_the_only_worker_keeps_what_it_has_while_it_is_silent(store: EmbeddingStore) -> None:
    async with FakeCluster(store, health_timeout=NEVER) as cluster:
        worker, encoder = cluster.pd_workers[0], cluster.encoders[0]
        encoder.gate.clear()
        asked = asyncio.create_task(cluster.ask(user("?", picture("p"))))
        await until(lambda: encoder.jobs, "the job")
        for one in (worker, encoder):
            one.health.answers.clear()
        await until(lambda: all(known.silent for known in cluster.pool.workers.values()), "their silence")
        encoder.gate.set()
        assert (await asked).choices[0].message.content == whole_text(8)
        assert (len(encoder.jobs), len(worker.submits)) == (1, 1)
