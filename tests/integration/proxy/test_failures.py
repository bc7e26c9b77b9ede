from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import pytest
from openai import APIStatusError

from support.fakes.fake_workers import key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.ec_connector.registry.registry import Registry, RegistrySnapshot
from triptych.ec_connector.store.control import StoreUnavailable
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.protos import common_pb2, encoder_pb2, pd_pb2
from triptych.types import ItemPlan

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


async def test_a_pd_worker_that_stalls_is_left_for_another_one(store: EmbeddingStore) -> None:
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


async def test_a_request_that_a_pd_worker_gives_up_is_resumed(store: EmbeddingStore) -> None:
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


async def test_a_senseless_event_ends_its_request_and_no_other(store: EmbeddingStore) -> None:
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


async def test_a_pd_worker_that_stops_gets_no_say_a_resume_goes_elsewhere(store: EmbeddingStore) -> None:
    stopping = common_pb2.Error(code="unavailable", message="stopping")
    async with FakeCluster(store) as cluster:
        cluster.pd_workers[0].refusals.append(stopping)
        assert await cluster.stream(TEXT) == whole_text(8)
        assert [submit.attempt for submit in cluster.pd_workers[0].submits] == [1, 2]


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


async def test_the_third_loss_of_one_item_is_a_503(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        cluster.pd_workers[0].missing[key_of(picture("p"))] = ["", "", ""]
        with pytest.raises(APIStatusError) as caught:
            await cluster.ask(user("?", picture("p")))
        assert caught.value.status_code == 503
        await cluster.at_rest()


async def test_a_loss_told_again_on_every_new_stream_is_one_loss(store: EmbeddingStore) -> None:
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


async def test_media_wait_for_an_encoder_until_the_deadline_and_then_get_503(store: EmbeddingStore) -> None:
    async with FakeCluster(store, request_timeout=1.5) as cluster:
        await cluster.encoders[0].kill()
        with pytest.raises(APIStatusError) as caught:
            await cluster.ask(user("?", picture("p")))
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert await cluster.stream(TEXT) == whole_text(8)
        await cluster.at_rest()


async def test_a_worker_that_comes_later_is_used_without_a_restart(store: EmbeddingStore) -> None:
    async with FakeCluster(store, encoders=2) as cluster:
        newcomer = cluster.encoders[1]
        await cluster.registry.withdraw(newcomer.info)
        await newcomer.kill()
        # With its channel: a check that began before its end would fail after its start.
        await until(lambda: ("encoder", newcomer.address) not in cluster.pool.workers, "it to be forgotten")
        await newcomer.start()
        await cluster.registry.register(newcomer.info, term=600.0)
        await until(lambda: len(cluster.pool.serving("encoder")) == 2)
        for encoder in cluster.encoders:
            encoder.gate.clear()
        asked = asyncio.create_task(cluster.ask(user("?", picture("a"), picture("b"))))
        await until(lambda: len(newcomer.jobs) == 1)
        for encoder in cluster.encoders:
            encoder.gate.set()
        await asked


async def test_a_check_that_began_before_a_restart_says_nothing_about_the_new_process(
    store: EmbeddingStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeCluster(store) as cluster:
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


class BrokenStore:
    """The view that a proxy has of a store, and of the registry in it, which can be switched off."""

    def __init__(self, store: EmbeddingStore) -> None:
        self.store = store
        self.registry = Registry(store)
        self.down = False

    async def poll(self, proxy_id: str, term: float, *, mark: str) -> RegistrySnapshot:
        self._check()
        return await self.registry.poll(proxy_id, term, mark=mark)

    async def look_up(self, keys: Sequence[tuple[str, str]]) -> list[ItemPlan | None]:
        self._check()
        return await self.store.look_up(keys)

    async def epoch(self) -> str:
        self._check()
        return await self.store.epoch()

    @property
    def clock_jumps(self) -> int:
        return self.store.clock_jumps

    def _check(self) -> None:
        if self.down:
            raise StoreUnavailable("switched off")


async def test_text_goes_on_without_the_store_while_media_get_503_in_time(store: EmbeddingStore) -> None:
    view = BrokenStore(store)
    async with FakeCluster(store, store_view=view, registry_view=view, request_timeout=3.0) as cluster:
        view.down = True
        await until(lambda: not cluster.pool.store_ok)
        assert await cluster.stream(TEXT) == whole_text(8)
        with pytest.raises(APIStatusError) as caught:
            await cluster.ask(user("?", picture("p")))
        assert caught.value.status_code == 503
        assert "store" in caught.value.body["message"]
        ready = await cluster.client._client.get(f"http://127.0.0.1:{cluster.port}/ready")
        assert (ready.status_code, ready.json()["degraded"]) == (200, "store")
        view.down = False
        await until(lambda: cluster.pool.store_ok)
        assert (await cluster.ask(user("?", picture("p")))).choices[0].message.content == whole_text(8)


async def test_workers_that_a_flush_has_unregistered_stay_in_use_by_their_health(
    store: EmbeddingStore,
) -> None:
    async with FakeCluster(store) as cluster:
        await store.control.execute("FLUSHALL")
        await until(lambda: not any(worker.registered for worker in cluster.pool.workers.values()))
        reply = await cluster.ask(user("?", picture("p")))
        assert reply.choices[0].message.content == whole_text(8)
        await cluster.encoders[0].kill()
        await until(lambda: len(cluster.pool.workers) == 1)


async def test_without_any_worker_the_proxy_is_not_ready_and_answers_503(store: EmbeddingStore) -> None:
    async with FakeCluster(store, encoders=0, pd_workers=0) as cluster:
        ready = await cluster.client._client.get(f"http://127.0.0.1:{cluster.port}/ready")
        assert ready.status_code == 503
        with pytest.raises(APIStatusError) as caught:
            await cluster.ask(TEXT)
        assert caught.value.status_code == 503


async def test_a_burst_of_requests_is_answered_to_the_last_one(store: EmbeddingStore) -> None:
    async with FakeCluster(store, encoders=2, pd_workers=2, max_queue=1000) as cluster:
        asked = [cluster.stream(user(f"q{i}", picture(f"p{i % 20}")), max_tokens=4) for i in range(60)]
        assert await asyncio.gather(*asked) == [whole_text(4)] * 60
        assert len(cluster.jobs) == 20
        await cluster.at_rest()


def _tokens(worker: object) -> int:
    requests = worker.requests.values()  # type: ignore[attr-defined]
    return max((sum(e.HasField("tokens") for e in held.events) for held in requests), default=0)


def _owned_by(address: str, token: str) -> encoder_pb2.JobFailed:
    error = common_pb2.Error(code="unavailable", message="another worker encodes it")
    return encoder_pb2.JobFailed(error=error, retryable=True, owner_address=address, owner_token=token)
