"""A request that ends every PD worker which takes it up."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator

import pytest
from openai import InternalServerError

from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.protos import pd_pb2
from triptych.proxy.routing import CLEARING_TOKENS
from triptych.store.embedding_store import EmbeddingStore

LOST = "lost with"


@pytest.fixture(autouse=True)
def error_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "triptych.proxy"):
        yield


def ends(cluster: FakeCluster) -> int:
    return sum(worker.ends for worker in cluster.pd_workers)


async def poisoned(cluster: FakeCluster, tokens: int | str, **extra: object) -> str:
    """The error id with which the poison ends."""
    with pytest.raises(InternalServerError) as caught:
        await cluster.ask(user(f"poison {tokens}"), max_tokens=30, **extra)
    assert caught.value.status_code == 500
    found = re.search(r"error id ([0-9a-f]{16})", caught.value.message)
    assert found, caught.value.message
    return found[1]


@pytest.mark.parametrize(("workers", "tokens"), [(1, 0), (3, 5), (3, 20)])
async def test_a_poison_ends_three_workers_and_the_requests_beside_it_are_answered(
    store: EmbeddingStore, caplog: pytest.LogCaptureFixture, workers: int, tokens: int
) -> None:
    async with FakeCluster(store, pd_workers=workers) as cluster:
        for worker in cluster.pd_workers:
            worker.admission.clear()
        bad = asyncio.create_task(poisoned(cluster, tokens))
        good = [asyncio.create_task(cluster.stream(user(f"q{i}"), max_tokens=40)) for i in range(10)]
        good += [
            asyncio.create_task(cluster.stream(user("?", picture(f"p{i}")), max_tokens=4)) for i in range(3)
        ]
        await until(lambda: sum(len(worker.requests) for worker in cluster.pd_workers) == 14)
        for worker in cluster.pd_workers:
            worker.admission.set()
        error_id = await bad
        assert await asyncio.gather(*good) == [whole_text(40)] * 10 + [whole_text(4)] * 3
        # A late poison is cleared whenever its trial brings so many new tokens, and must then be found again
        # by two ends; how often that is depends on the tokens that a worker's end has overtaken.
        assert 3 <= ends(cluster) <= 3 + 2 * (tokens // CLEARING_TOKENS)
        assert any(
            error_id in record.getMessage() and record.levelno == logging.ERROR for record in caplog.records
        )
        await cluster.at_rest()
        assert not cluster.dispatcher._router.suspects._losses


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_poison_that_ends_workers_before_they_answer_the_submit_is_found(store, workers):
    async with FakeCluster(store, pd_workers=workers) as cluster:
        good = asyncio.gather(*(cluster.stream(user(f"q{i}"), max_tokens=30) for i in range(4)))
        await poisoned(cluster, "door")
        assert ends(cluster) == 3
        assert await good == [whole_text(30)] * 4
        await cluster.at_rest()


def hand_over(worker: FakePD) -> None:
    """What a worker does at the end of its drain."""
    for held in list(worker.requests.values()):
        worker.emit(held, lost=pd_pb2.Lost())
        held.task.cancel()
    worker.requests.clear()
    worker.isolation.__init__()  # type: ignore[misc]


@pytest.mark.parametrize("signal", ["handed over", "the stream broke", "the stream was ended"])
async def test_what_is_no_loss_makes_no_suspects(cluster, caplog, signal):
    worker = cluster.pd_workers[0]
    worker.gate.clear()
    asked = asyncio.create_task(cluster.stream(user("q"), max_tokens=30))
    for round_number in range(1, 4):
        await until(lambda: len(worker.requests) == 1)
        attached = len(worker.attaches)
        if signal == "handed over":
            submits = len(worker.submits)
            hand_over(worker)
            await until(lambda count=submits: len(worker.submits) > count, f"resume {round_number}")
            continue
        worker.leaving = signal == "the stream was ended"
        worker.break_streams()
        await until(lambda count=attached: len(worker.attaches) > count, f"stream {round_number}")
    worker.gate.set()
    assert await asked == whole_text(30)
    assert not worker.set_apart
    assert LOST not in caplog.text
