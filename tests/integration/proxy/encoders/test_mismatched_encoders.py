"""Encoders whose embeddings no PD worker takes, and a picture that ends every encoder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from openai import APIStatusError, BadRequestError

from support.fakes.fake_encoder import FakeEncoder
from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import MODEL_KEY, WIDTH, FakeWorker, key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until

OTHER_KEY, OTHER_NAMESPACE = "c" * 64, "d" * 64


@contextlib.asynccontextmanager
async def joined(cluster: FakeCluster, worker: FakeWorker) -> AsyncIterator[None]:
    """The worker beside those of the cluster, once the proxy knows it."""
    await worker.start()
    await cluster.registry.register(worker.info, term=600.0)
    await until(lambda: (worker.pool, worker.address) in cluster.pool.workers, "the registration")
    if isinstance(worker, FakePD):
        await until(lambda: worker.attaches, "the stream to the PD worker")
    yield
    await worker.kill()


def mismatched(cluster: FakeCluster, reason: str) -> float:
    value = cluster.metrics.registry.get_sample_value("triptych_mismatched_encoders", {"reason": reason})
    assert value is not None
    return value


async def answers(cluster: FakeCluster, *names: str) -> None:
    for name in names:
        reply = await cluster.ask(user("?", picture(name)))
        assert reply.choices[0].message.content == whole_text(8)


async def test_an_encoder_of_another_key_gets_no_jobs_until_a_pd_worker_of_its_key_is_there(store, caplog):
    async with FakeCluster(store) as cluster:
        foreign, new = FakeEncoder(store), FakePD()
        foreign.model_key = new.model_key = OTHER_KEY
        foreign.namespace = OTHER_NAMESPACE
        with caplog.at_level(logging.WARNING):
            async with joined(cluster, foreign):
                await answers(cluster, "one", "two", "three")
                assert (len(foreign.jobs), len(cluster.encoders[0].jobs)) == (0, 3)
                assert mismatched(cluster, "model_key") == 1
                async with joined(cluster, FakeEncoder(store)):
                    pass  # the registry has changed twice: what is known is not logged again
                (line,) = [r.getMessage() for r in caplog.records if foreign.address in r.getMessage()]
                for word in (MODEL_KEY[:12], OTHER_KEY[:12], OTHER_NAMESPACE[:12], "--model-revision"):
                    assert word in line
                # The other half of a rolling update: from here on both versions are served.
                async with joined(cluster, new):
                    await until(lambda: mismatched(cluster, "model_key") == 0, "the match")
                    await answers(cluster, "four")
                    assert [job.namespace for job in foreign.jobs] == [OTHER_NAMESPACE]
        await cluster.at_rest()


async def test_with_only_a_wrong_encoder_pictures_wait_within_their_deadline_and_text_goes_on(store):
    async with FakeCluster(store, encoders=0, pd_workers=0, request_timeout=1.5) as cluster:
        pd_worker, wrong = FakePD(), FakeEncoder(store)
        pd_worker.row_width, wrong.row_width = WIDTH, WIDTH + 1
        async with joined(cluster, pd_worker), joined(cluster, wrong):
            assert await cluster.stream([{"role": "user", "content": "count"}]) == whole_text(8)
            with pytest.raises(APIStatusError) as error:
                await cluster.ask(user("?", picture("one")))
            assert error.value.status_code in (503, 504)
            assert not wrong.jobs
        await cluster.at_rest()


POISON = picture("poison")


@pytest.mark.parametrize("encoders", [1, 2])
@pytest.mark.parametrize("stage", ["plan", "tower"])
async def test_a_picture_that_ends_three_encoders_is_refused_and_the_others_go_on(store, encoders, stage):
    async with FakeCluster(store, encoders=encoders) as cluster:
        for encoder in cluster.encoders:
            encoder.ends_at[key_of(POISON)] = stage
        bad = asyncio.create_task(cluster.ask(user("?", POISON)))
        pictures = asyncio.gather(*(cluster.stream(user("?", picture(f"p{i}"))) for i in range(6)))
        assert await cluster.stream([{"role": "user", "content": "count"}]) == whole_text(8)
        with pytest.raises(BadRequestError, match="3 encoder workers ended") as caught:
            await bad
        assert caught.value.param == "messages[0].content[0].image_url.url"
        assert sum(len(encoder.restarts) for encoder in cluster.encoders) == 3
        assert await pictures == [whole_text(8)] * 6
        await cluster.at_rest()


async def test_the_items_that_an_encoder_loses_make_one_line(cluster, caplog):
    encoder = cluster.encoders[0]
    encoder.gate.clear()
    asked = asyncio.create_task(cluster.ask(user("?", *(picture(f"p{i}") for i in range(4)))))
    await until(lambda: len(encoder.media) == 4)
    with caplog.at_level(logging.INFO, "triptych.proxy.encoders.job_runner"):
        await encoder.kill()
        await until(lambda: "elsewhere" in caplog.text)
        encoder.gate.set()
        await encoder.start()
        await asked
    first = next(message for message in caplog.messages if "elsewhere" in message)
    assert f"{encoder.address}: 4 (" in first
