"""Encoder jobs whose worker dies, stalls, fails or does not own the lease; embeddings that are lost."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from openai import APIStatusError

from support.fakes.fake_workers import key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.protos import common_pb2, encoder_pb2
from triptych.proxy.requests import lifecycle
from triptych.store.embedding_store import EmbeddingStore


async def test_an_encoder_that_stalls_loses_its_jobs_to_another_one(store: EmbeddingStore) -> None:
    async with FakeCluster(store, encoders=2, health_timeout=0.3) as cluster:
        for encoder in cluster.encoders:
            encoder.tower.clear()
        asked = asyncio.create_task(cluster.ask(user("?", picture("p"))))
        await until(lambda: any(encoder.runs for encoder in cluster.encoders))
        first, second = sorted(cluster.encoders, key=lambda encoder: -encoder.runs)
        second.tower.set()
        first.health.answers.clear()
        await asked
        assert second.runs == 1
        first.health.answers.set()


async def test_an_encoder_that_is_silent_in_a_job_loses_it_to_another_one(store: EmbeddingStore) -> None:
    async with FakeCluster(store, encoders=2, phase_timeout=0.5) as cluster:
        for encoder in cluster.encoders:
            encoder.tower.clear()
        asked = asyncio.create_task(cluster.ask(user("?", picture("p"))))
        await until(lambda: any(encoder.runs for encoder in cluster.encoders))
        first, second = sorted(cluster.encoders, key=lambda encoder: -encoder.runs)
        second.tower.set()
        await asked
        assert second.runs == 1


async def test_a_job_goes_to_another_encoder_when_its_own_dies(store: EmbeddingStore) -> None:
    async with FakeCluster(store, encoders=2) as cluster:
        for encoder in cluster.encoders:
            encoder.tower.clear()
        asked = asyncio.create_task(cluster.ask(user("?", picture("p"))))
        await until(lambda: any(encoder.runs for encoder in cluster.encoders))
        first, second = sorted(cluster.encoders, key=lambda encoder: -encoder.runs)
        second.tower.set()
        await first.kill()
        await asked
        assert second.runs == 1
        await cluster.at_rest()


async def test_a_job_waits_for_an_encoder_that_is_started_again(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        encoder = cluster.encoders[0]
        encoder.gate.clear()
        asked = asyncio.create_task(cluster.ask(user("?", picture("p"))))
        await until(lambda: len(cluster.jobs) == 1)
        await encoder.kill()
        await asyncio.sleep(0.2)
        encoder.gate.set()
        await encoder.start()
        await asked
        assert len(cluster.jobs) >= 2


async def test_a_retry_sends_the_same_media_and_key(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        busy = common_pb2.Error(code="overloaded", message="busy")
        failed = encoder_pb2.JobFailed(error=busy, retryable=True)
        cluster.encoders[0].failures += [failed, failed]
        await cluster.ask(user("?", picture("p")))
        assert cluster.encoders[0].media == [picture("p")] * 3
        assert {job.mm_hash for job in cluster.jobs} == {key_of(picture("p"))}
        assert len({job.job_id for job in cluster.jobs}) == 3


async def test_an_item_that_makes_every_try_fail_ends_with_the_workers_error(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        broken = common_pb2.Error(code="internal_error", message="the tower failed on the item")
        cluster.encoders[0].failures += [encoder_pb2.JobFailed(error=broken, retryable=True)] * 9
        with pytest.raises(APIStatusError) as caught:
            await cluster.ask(user("?", picture("poison")))
        assert caught.value.status_code == 500
        assert len(cluster.jobs) == 4
        await cluster.at_rest()


async def test_a_job_joins_the_owner_of_the_items_lease(store: EmbeddingStore) -> None:
    async with FakeCluster(store, encoders=2) as cluster:
        first, second = cluster.encoders
        for encoder, other in ((first, second), (second, first)):
            encoder.failures.append(_owned_by(other.address, "token-1"))
        cluster.encoders[0].failures = cluster.encoders[0].failures[:1]
        asked = asyncio.create_task(cluster.ask(user("?", picture("p"))))
        await until(lambda: len(cluster.jobs) >= 2)
        await asked
        assert all(len(encoder.jobs) >= 1 for encoder in cluster.encoders)


async def test_the_lease_of_an_owner_that_is_gone_is_named_in_the_retry(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        cluster.encoders[0].failures.append(_owned_by("127.0.0.1:1", "token-2"))
        await cluster.ask(user("?", picture("p")))
        assert [job.failed_lease_token for job in cluster.jobs] == ["", "token-2"]


async def test_an_embedding_that_is_gone_is_encoded_again_and_named_when_damaged(
    store: EmbeddingStore,
) -> None:
    async with FakeCluster(store) as cluster:
        key = key_of(picture("p"))
        digest = hashlib.sha1(b"x").hexdigest()
        cluster.pd_workers[0].missing[key] = ["", digest]
        reply = await cluster.ask(user("?", picture("p")))
        assert reply.choices[0].message.content == whole_text(8)
        assert [job.re_encode for job in cluster.jobs] == [False, True, True]
        assert [job.damaged_digest for job in cluster.jobs] == ["", "", digest]
        assert all(job.media_bytes == len(picture("p")) for job in cluster.jobs)
        await cluster.at_rest()


async def test_an_item_that_the_store_keeps_losing_is_a_503(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_LONGEST_PAUSE", 0.01)
    async with FakeCluster(store) as cluster:
        cluster.pd_workers[0].missing[key_of(picture("p"))] = [""] * lifecycle.MAX_ITEM_LOSSES
        with pytest.raises(APIStatusError) as caught:
            await cluster.ask(user("?", picture("p")))
        assert caught.value.status_code == 503
        await cluster.at_rest()


async def test_a_loss_reported_again_on_every_new_stream_is_one_loss(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        pd, encoder = cluster.pd_workers[0], cluster.encoders[0]
        pd.missing[key_of(picture("p"))] = [""]
        encoder.tower.clear()
        asked = asyncio.create_task(cluster.ask(user("?", picture("p"))))
        await until(lambda: encoder.runs == 1, "the first encoding")
        encoder.gate.clear()
        encoder.tower.set()
        await until(lambda: len(encoder.jobs) == 2, "the second job")
        for times in range(2, 5):
            pd.break_streams()
            await until(lambda attached=times: len(pd.attaches) == attached, "the next stream")
        encoder.gate.set()
        reply = await asked
        assert reply.choices[0].message.content == whole_text(8)
        assert len(cluster.jobs) == 2
        await cluster.at_rest()


def _owned_by(address: str, token: str) -> encoder_pb2.JobFailed:
    error = common_pb2.Error(code="unavailable", message="another worker encodes it")
    return encoder_pb2.JobFailed(error=error, retryable=True, owner_address=address, owner_token=token)
