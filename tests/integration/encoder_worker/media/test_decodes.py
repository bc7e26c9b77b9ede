"""Decodes of a worker under real streams: who leaves takes the process along, whoever else waits keeps it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.data.pictures import picture
from support.engine.encoder_bench import Bench, Job, OpenBench, png
from support.waiting import until
from triptych.base.hashing import tenant_digest
from triptych.encoder_worker.decode_places import DecodePlace
from triptych.encoder_worker.media import decoder_process, work
from triptych.protos import encoder_pb2

ALICE, BOB = map(tenant_digest, ("alice", "bob"))


class Decoders:
    """The processes that a worker starts: real ones that say nothing, or the real program once `works`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[Any] = []
        self.works = False
        real = decoder_process.subprocess.Popen
        sleeper = [decoder_process.sys.executable, "-c", "import time; time.sleep(600)"]

        def popen(command: Any, **more: Any) -> Any:
            self.all.append(real(command if self.works else sleeper, **more))
            return self.all[-1]

        monkeypatch.setattr(decoder_process.subprocess, "Popen", popen)
        # Every picture is one that takes long.
        monkeypatch.setattr(work, "CHEAP_SECONDS", -1.0)

    @property
    def running(self) -> int:
        return sum(each.poll() is None for each in self.all)


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> Decoders:
    return Decoders(monkeypatch)


def used(b: Bench) -> int:
    """Places of processes in use."""
    return b.worker._loop._scheduler.places.used(DecodePlace.PROCESS)


async def sent(b: Bench, seed: int, tenant: str) -> Job:
    """A job whose media are at the worker."""
    job = await Job(b, png(picture(seed, 64, 64)), changes={"tenant": tenant}).start()
    await job.send_media()
    return job


async def test_a_decode_ends_with_its_client_and_what_it_had_queued_never_begins(open_bench, decoders):
    async with open_bench(decode_threads=2) as b:
        jobs = [await sent(b, seed, ALICE) for seed in range(6)]
        await until(lambda: [job.heavy for job in b.worker.jobs.open_jobs()] == [True] * 6, "all headers")
        await until(lambda: decoders.running == 2, "the decodes of one tenant")
        assert used(b) == 2
        for job in reversed(jobs):
            job.call.cancel()
        await until(lambda: not len(b.worker.jobs) and not used(b), "the end of all jobs")
        assert len(decoders.all) == 2
        assert decoders.running == 0
        await until(lambda: b.worker.media.nbytes == b.worker.decoded.nbytes == 0, "their bytes")
        assert b.metric("triptych_encoder_decodes_abandoned_total") == 2
        assert b.metric("triptych_encoder_decode_seconds_total") > 0
        await b.until("triptych_encoder_decodes", 0)


async def test_of_two_clients_of_one_item_one_leaves_and_the_decode_goes_on(open_bench, decoders):
    async with open_bench(decode_threads=1) as b:
        first, second = await sent(b, 1, ALICE), await sent(b, 1, BOB)
        await until(lambda: decoders.running == 1, "the decode")
        (job,) = b.worker.jobs.open_jobs()
        await until(lambda: len(job.waiters) == 2, "both clients")
        first.call.cancel()
        await until(lambda: len(job.waiters) == 1, "one client less")
        assert job.tenant == BOB
        assert decoders.running == 1
        second.call.cancel()
        await until(lambda: decoders.running == 0, "the end of the decode")
        assert len(decoders.all) == 1


async def test_a_tenant_that_comes_later_has_a_place_beside_a_flood(open_bench, decoders):
    async with open_bench(decode_threads=2) as b:
        for seed in range(8):
            await sent(b, seed, ALICE)
        await until(lambda: decoders.running == 2, "the flood's decodes")
        decoders.works = True
        job = await sent(b, 99, BOB)
        assert (await job.event()).WhichOneof("body") == "planned"
        assert decoders.running == 2


async def test_the_seconds_of_a_decode_are_its_tenants(open_bench, decoders):
    async with open_bench(decode_threads=1) as b:
        places = b.worker._loop._scheduler.places
        job = await sent(b, 1, ALICE)
        await until(lambda: decoders.running == 1, "the decode")
        began = asyncio.get_running_loop().time()
        assert places.seconds(ALICE, began + 5.0) > 4.0
        job.call.cancel()
        await until(lambda: not used(b), "its end")
        assert places.seconds(ALICE, began) > places.seconds(BOB, began)


async def test_a_decoder_that_dies_fails_its_job_alone_with_the_remedy(open_bench, decoders):
    async with open_bench(decode_threads=1) as b:
        job = await sent(b, 1, ALICE)
        await until(lambda: decoders.running == 1, "the decode")
        decoders.all[0].kill()
        failed = (await job.last()).failed
        assert failed.error.param == "image" and not failed.retryable
        assert "ended by SIGKILL" in failed.error.message and "send another" in failed.error.message
        decoders.works = True
        assert (await (await Job(b, png(picture(2, 64, 64))).planned()).finished()).WhichOneof(
            "body"
        ) == "ready"


async def test_a_decode_above_the_limit_is_refused_before_it_begins(open_bench, decoders, monkeypatch):
    monkeypatch.setattr("triptych.encoder_worker.media.formats.picture_seconds", lambda *_: 31.0)
    async with open_bench() as b:
        job = await sent(b, 1, ALICE)
        failed = (await job.last()).failed
        assert (failed.error.code, failed.error.param) == ("request_too_large", "image")
        assert "31 s, more than the 30 s allowed" in failed.error.message
        assert "--max-decode-seconds" in failed.error.message
        assert not decoders.all


async def test_a_worker_that_stops_leaves_no_decoder(open_bench: OpenBench, decoders: Decoders) -> None:
    async with open_bench(decode_threads=2) as b:
        for seed in range(4):
            await sent(b, seed, ALICE)
        await until(lambda: decoders.running == 2, "the decodes")
    assert decoders.running == 0


async def test_the_proxy_hears_of_a_job_that_waits_for_its_decode(open_bench, decoders, monkeypatch):
    monkeypatch.setattr("triptych.encoder_worker.jobs.loop.DECODING_SECONDS", 0.05)
    async with open_bench(decode_threads=1) as b:
        jobs = [await sent(b, seed, ALICE) for seed in range(2)]
        for job in jobs:
            assert (await job.event()).WhichOneof("body") == "waits"


async def test_decoded_bytes_stand_in_the_memory_of_prepared_media(open_bench, monkeypatch, decoders):
    """Two pictures whose bytes do not fit together are decoded one after the other."""
    monkeypatch.setattr(work, "SMALL_BYTES", 0)
    nbytes = 64 * 64 * 4
    async with open_bench(decode_threads=2, prepared_memory=2 * nbytes - 1) as b:
        first, second = await sent(b, 1, ""), await sent(b, 2, "")
        await until(lambda: used(b) == 2 and decoders.running == 1, "the first decode")
        assert b.worker.decoded.nbytes == nbytes
        assert b.metric("triptych_encoder_decoded_bytes") == nbytes
        first.call.cancel()
        second.call.cancel()
        await until(lambda: not used(b) and b.worker.decoded.nbytes == 0, "the end of both")
    async with open_bench(decode_threads=2, prepared_memory=2 * nbytes) as b:
        await sent(b, 1, "")
        await sent(b, 2, "")
        await until(lambda: decoders.running == 2, "both at once")
        assert b.worker.decoded.nbytes == 2 * nbytes


@pytest.mark.parametrize("tenant", ["alice", "0" * 15, "G" * 16])
async def test_a_tenant_that_is_no_digest_is_refused_by_its_field(b: Bench, tenant: str) -> None:
    job = await Job(b, png(picture(1, 64, 64)), changes={"tenant": tenant}).start()
    event: encoder_pb2.EncodeEvent = await job.last()
    assert event.failed.error.param == "tenant"
