"""Requests whose PD worker dies, stalls, refuses them or sends wrong events."""

from __future__ import annotations

import asyncio

import pytest
from openai import APIStatusError

from support.fakes.fake_workers import key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.protos import common_pb2, pd_pb2
from triptych.store.embedding_store import EmbeddingStore

TEXT = [{"role": "user", "content": "count"}]


async def test_a_pd_worker_killed_in_mid_stream_is_taken_over_without_a_token_twice_or_missing(
    store: EmbeddingStore,
) -> None:
    async with FakeCluster(store, pd_workers=2) as cluster:
        for worker in cluster.pd_workers:
            worker.pause_at = 20
        asked = asyncio.create_task(cluster.stream(TEXT, max_tokens=50))
        await until(lambda: any(_tokens(worker) == 20 for worker in cluster.pd_workers))
        first, second = sorted(cluster.pd_workers, key=lambda worker: -len(worker.submits))
        second.pause_at = None
        await first.kill()
        assert await asked == whole_text(50)
        resumed = second.submits[0]
        assert resumed.attempt == 2
        assert list(resumed.resume.prompt_token_ids) == [1, 2, 3]
        received = list(resumed.resume.output_token_ids)
        assert received
        assert received == [1000 + i for i in range(len(received))]
        assert resumed.resume.text_sent_chars == len(whole_text(len(received)))
        await cluster.at_rest()


async def test_a_pd_worker_that_is_started_again_takes_its_requests_up(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        worker = cluster.pd_workers[0]
        worker.pause_at = 10
        asked = asyncio.create_task(cluster.stream(user("?", picture("p")), max_tokens=30))
        await until(lambda: _tokens(worker) == 10)
        await worker.kill()
        worker.pause_at = None
        worker.gate.set()
        await worker.start()
        assert await asked == whole_text(30)
        assert len(cluster.jobs) == 1
        slot = worker.submits[-1].items[0]
        assert (slot.plan.mm_hash, slot.state) == (key_of(picture("p")), 1)
        assert list(worker.submits[-1].resume.placements)[0].length == 4


async def test_a_broken_stream_is_attached_again_at_the_last_positions(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        worker = cluster.pd_workers[0]
        worker.pause_at = 5
        asked = asyncio.create_task(cluster.stream(TEXT, max_tokens=12))
        await until(lambda: cluster.received == 5)
        worker.break_streams()
        await until(lambda: len(worker.attaches) == 2)
        worker.gate.set()
        assert await asked == whole_text(12)
        assert [(r.attempt, r.position) for r in worker.attaches[1].requests] == [(1, 5)]
        assert len(worker.submits) == 1


async def test_a_request_of_a_stalled_pd_worker_resumes_on_another_one(store: EmbeddingStore) -> None:
    async with FakeCluster(store, pd_workers=2, health_timeout=0.3) as cluster:
        for worker in cluster.pd_workers:
            worker.pause_at = 6
        asked = asyncio.create_task(cluster.stream(TEXT, max_tokens=12))
        await until(lambda: any(_tokens(worker) == 6 for worker in cluster.pd_workers))
        first, second = sorted(cluster.pd_workers, key=lambda worker: -len(worker.submits))
        second.pause_at = None
        first.health.answers.clear()
        assert await asked == whole_text(12)
        assert second.submits[0].attempt == 2
        first.health.answers.set()


async def test_a_request_that_fails_as_unavailable_is_resumed(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        worker = cluster.pd_workers[0]
        worker.pause_at = 3
        asked = asyncio.create_task(cluster.stream(TEXT, max_tokens=6))
        await until(lambda: _tokens(worker) == 3)
        held = next(iter(worker.requests.values()))
        worker.pause_at = None
        error = common_pb2.Error(code="unavailable", message="the engine stopped")
        worker.emit(held, finished=pd_pb2.Finished(reason="error", error=error))
        held.task.cancel()
        worker.gate.set()
        assert await asked == whole_text(6)


async def test_frames_that_come_twice_are_shown_once(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        cluster.pd_workers[0].repeat_frames = True
        assert await cluster.stream(TEXT, max_tokens=12) == whole_text(12)


async def test_an_invalid_event_ends_its_request_and_no_other(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        pd = cluster.pd_workers[0]
        pd.gate.clear()
        asked = [asyncio.create_task(cluster.ask(user(text))) for text in ("one", "two")]
        await until(lambda: len(pd.requests) == 2)
        held = next(iter(pd.requests.values()))
        pd.emit(held, finished=pd_pb2.Finished(reason="no reason"))
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        [failed] = [task.exception() for task in done]
        assert isinstance(failed, APIStatusError)
        assert failed.status_code == 500
        pd.gate.set()
        [answered] = [task for task in asked if task not in done]
        assert (await answered).choices[0].message.content == whole_text(8)


async def test_a_full_pd_worker_is_passed_over_and_all_full_is_429(store: EmbeddingStore) -> None:
    full = common_pb2.Error(code="overloaded", message="full", retry_after=1.0)
    async with FakeCluster(store, pd_workers=2) as cluster:
        for worker in cluster.pd_workers:
            worker.refusals.append(full)
        with pytest.raises(APIStatusError) as caught:
            await cluster.ask(TEXT)
        assert caught.value.status_code == 429
        assert (await cluster.ask(TEXT)).choices[0].message.content == whole_text(8)


async def test_a_request_refused_by_a_pd_worker_that_stops_is_submitted_again(store: EmbeddingStore) -> None:
    stopping = common_pb2.Error(code="unavailable", message="stopping")
    async with FakeCluster(store) as cluster:
        cluster.pd_workers[0].refusals.append(stopping)
        assert await cluster.stream(TEXT) == whole_text(8)
        assert [submit.attempt for submit in cluster.pd_workers[0].submits] == [1, 2]


def _tokens(worker: object) -> int:
    requests = worker.requests.values()  # type: ignore[attr-defined]
    return max((sum(e.HasField("tokens") for e in held.events) for held in requests), default=0)
