"""Multi-turn chats whose embeddings the store has lost: what a PD worker holds is not encoded again."""

from __future__ import annotations

import asyncio
from typing import Any

from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.protos import pd_pb2
from triptych.store import keys
from triptych.store.embedding_store import EmbeddingStore

FIRST, SECOND = picture("first"), picture("second")
UNENCODED = pd_pb2.ITEM_STATE_UNENCODED


def keeping(cluster: FakeCluster) -> FakeCluster:
    """Its PD workers keep what items gave; it is not started yet."""
    for worker in cluster.pd_workers:
        worker.keeps_items = True
    return cluster


def next_turn(messages: list[dict[str, Any]], *pictures: bytes) -> list[dict[str, Any]]:
    """The conversation with its answer and one question more."""
    return [*messages, {"role": "assistant", "content": whole_text(8)}, *user("and now?", *pictures)]


async def first_turn(cluster: FakeCluster, *pictures: bytes) -> list[dict[str, Any]]:
    """A conversation whose embeddings are lost, and whose PD worker holds what they gave; its next turn."""
    messages = user("?", *pictures)
    assert await cluster.stream(messages) == whole_text(8)
    for media in pictures:
        assert await cluster.store.control.execute("DEL", keys.embedding(key_of(media))) == 1
    served, *_ = by_service(cluster)
    served.held = {key_of(media) for media in pictures}
    return next_turn(messages)


def by_service(cluster: FakeCluster) -> list[FakePD]:
    """After a first turn: its PD workers, the one that served it before the others."""
    return sorted(cluster.pd_workers, key=lambda worker: not worker.submits)


async def killed_in_the_turn(cluster: FakeCluster, served: FakePD, turn: list[dict[str, Any]]) -> None:
    """The worker that has the conversation is killed after four tokens of its turn, and costs none."""
    served.held, served.pause_at = {key_of(FIRST)}, 4
    asked = asyncio.create_task(cluster.stream(turn))
    await until(lambda: cluster.received == 4, "four tokens")
    assert len(cluster.jobs) == 1
    await served.kill()
    assert await asked == whole_text(8)
    assert len(cluster.jobs) == 2


def states(worker: FakePD) -> list[int]:
    """Of the items of the latest request."""
    return [slot.state for slot in worker.submits[-1].items]


def counted(cluster: FakeCluster, name: str, result: str) -> float:
    return cluster.metrics.registry.get_sample_value(name, {"result": result}) or 0.0


async def test_the_second_turn_makes_no_job_for_what_the_worker_holds(store: EmbeddingStore) -> None:
    async with keeping(FakeCluster(store)) as cluster:
        turn = await first_turn(cluster, FIRST, SECOND)
        reply = await cluster.ask(turn, extra_body={"triptych_timings": True})
        assert reply.choices[0].message.content == whole_text(8)
        assert len(cluster.jobs) == 2
        assert states(cluster.pd_workers[0]) == [UNENCODED, UNENCODED]
        assert [item["cache"] for item in reply.triptych_timings["items"]] == ["pd", "pd"]
        assert counted(cluster, "triptych_skipped_jobs_total", "held") == 2
        assert counted(cluster, "triptych_items_total", "pd") == 2
        await cluster.at_rest()


async def test_what_the_worker_misses_is_encoded_and_counted(store: EmbeddingStore) -> None:
    async with keeping(FakeCluster(store)) as cluster:
        turn = await first_turn(cluster, FIRST, SECOND)
        cluster.pd_workers[0].held = {key_of(FIRST)}
        reply = await cluster.ask(turn, extra_body={"triptych_timings": True})
        assert reply.choices[0].message.content == whole_text(8)
        assert [job.mm_hash for job in cluster.jobs[2:]] == [key_of(SECOND)]
        assert [item["cache"] for item in reply.triptych_timings["items"]] == ["pd", "encoded"]
        assert counted(cluster, "triptych_skipped_jobs_total", "missing") == 1
        assert cluster.metrics.registry.get_sample_value("triptych_re_encodes_total") == 0
        await cluster.at_rest()


async def test_an_older_worker_that_takes_the_turn_over_looks_in_the_store_itself(store):
    async with keeping(FakeCluster(store, pd_workers=2)) as cluster:
        turn = await first_turn(cluster, FIRST)
        served, other = by_service(cluster)
        other.keeps_items = None
        await cluster.registry.register(other.info, term=600.0)
        known = cluster.pool.workers
        await until(lambda: "keeps_items" not in known["pd", other.address].info.capacity)
        other.missing = {key_of(FIRST): [""]}
        await killed_in_the_turn(cluster, served, turn)
        assert states(other) == [pd_pb2.ITEM_STATE_READY]
        assert counted(cluster, "triptych_skipped_jobs_total", "missing") == 1
        await cluster.at_rest()
