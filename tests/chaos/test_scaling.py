"""Pools that follow their work: bursts, kills and ends in the middle of a change; nothing is lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.chaos import faults
from support.chaos.stages import hold
from support.chaos.streams import Streams
from support.data.oracle import assert_exact
from support.data.traffic import Case, expected, picture
from support.processes.cluster import Cluster, scrape
from triptych.base.scaling import ScalingDecision, ScalingRules
from triptych.registry.scaling import ScalingBoard
from triptych.store.embedding_store import EmbeddingStore

pytestmark = pytest.mark.timeout(400)


_CHANGE = re.compile(r"(encoder|pd) pool of (\d+) \((\w+)\): (.*)")
_WORKER = re.compile(r"(start|drain) ((?:encoder|pd)-\d+)")


@dataclass(frozen=True)
class Change:
    """One change: how many ran before, why it changed, and by how many it grew or (below 0) shrank."""

    before: int
    reason: str
    by: int

    @property
    def after(self) -> int:
        return self.before + self.by


def changes(cluster: Cluster, pool: str, since: int = 0) -> list[Change]:
    """The pool's changes, in their order; of the log only what comes after `since` characters."""
    found = []
    for name, before, reason, rest in _CHANGE.findall(cluster.log.read_text(errors="replace")[since:]):
        words = [word for word, _ in _WORKER.findall(rest)]
        assert len(set(words)) == 1, f"both directions at once: {rest}"
        by = len(words) if words[0] == "start" else -len(words)
        found += [Change(int(before), reason, by)] if name == pool else []
    return found


TOKENS = 100
MAXIMUM = 3
#: An item sleeps so long in the tower: with 40 of them one encoder is far above --encoder-slo.
TOWER_SECONDS = 0.4
WORDS = ("--encoder-batch-patches", "1", "--encoder-slo", "4", "--scale-window", "3")


@pytest.fixture(scope="session")
def pictured() -> list[Case]:
    """A burst: requests of four pictures, all of them different."""
    pictures = [picture(number, 64, 64) for number in range(40)]
    return [
        Case((0, 1, "value", 2, 3, f"list {number}"), tuple(pictures[4 * number : 4 * number + 4]))
        for number in range(10)
    ]


@pytest.fixture(scope="session")
def pictured_reference(checkpoint: Path, pictured: list[Case]) -> list[Any]:
    return expected(checkpoint, pictured, TOKENS)


def scaled(
    start: Callable[..., Cluster], *words: str, tower: float = TOWER_SECONDS, step: float = 0.0
) -> Cluster:
    """A cluster whose encoders scale from none to MAXIMUM, and whose towers sleep."""
    environment = faults.sleeping(tower=tower, step=step)
    cluster: Cluster = start("--encoders", f"0..{MAXIMUM}", *WORDS, *words, environment=environment)
    return cluster


async def _empty(cluster: Cluster) -> None:
    await hold("the encoder pool to be empty again", lambda: not _encoders(cluster))


def _encoders(cluster: Cluster) -> list[str]:
    return [name for name in cluster.state()["processes"] if name.startswith("encoder-")]


async def test_a_picture_starts_the_first_encoder_and_text_needs_none(start, cases, reference):
    cluster = scaled(start, tower=0.0)
    text = next(index for index, case in enumerate(cases) if not case.encoded)
    pictured = next(index for index, case in enumerate(cases) if case.encoded)
    assert _encoders(cluster) == []
    for index, pool in ((text, 0), (pictured, 1)):
        async with Streams(cluster.url, [cases[index]], 100, ["first"]) as streams:
            (answer,) = await streams.all()
        assert_exact([reference[index]], [answer.token_ids])
        assert len(changes(cluster, "encoder")) >= pool
        assert pool or changes(cluster, "encoder") == []


@pytest.mark.slow
async def test_a_scaled_encoder_killed_in_a_burst_is_started_again_and_nothing_is_lost(
    start: Callable[..., Cluster], pictured: list[Case], pictured_reference: list[Any]
) -> None:
    cluster = scaled(start)
    async with Streams(cluster.url, pictured, TOKENS, ["kill"]) as streams:
        await hold("two encoders", lambda: len(cluster.pids("encoder")) >= 2, streams)
        name, pid = next(iter(cluster.pids("encoder").items()))
        assert cluster.total("proxy", "triptych_waiting_items"), "the burst is over"
        cluster.kill(name)
        await hold("the killed one again", lambda: cluster.pids("encoder").get(name, pid) != pid)
        got = await streams.all()
    assert_exact(pictured_reference, [answer.token_ids for answer in got])
    await _empty(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0.02, 0.4], ids=["finished", "handed_over"])
async def test_a_pd_worker_drained_in_its_streams_loses_no_token(start, cases, reference, step):
    """With the longer steps its streams outlast the drain, and are resumed at the other one."""
    texts = [index for index, case in enumerate(cases) if not case.encoded][:4]
    crowd = [cases[index] for index in texts]
    cluster = scaled(start, "--pd-workers", "1..2", "--max-num-seqs", "2", "--scale-window", "60", step=step)
    # Long enough for an average of some seconds to see it.
    tokens = 8 if step > 0.1 else 100
    async with Streams(cluster.url, crowd, tokens, ["up 1", "up 2", "up 3"]) as streams:
        await hold("the second PD worker", lambda: len(_running(cluster)) == 2)
        await streams.all()
    async with Streams(cluster.url, crowd, 100, ["drain"]) as streams:
        await hold("streams at each", lambda: all(_running(cluster)), streams)
        deciding = asyncio.create_task(_decide(cluster, "pd", 1))
        await hold("the drain", lambda: "drain pd-1" in cluster.log.read_text(errors="replace"), streams)
        deciding.cancel()
        got = await streams.all()
    assert_exact([reference[index] for index in texts], [answer.token_ids for answer in got])
    assert (cluster.total("proxy", "triptych_resumes_total") > 0) == (step > 0.1)


def _running(cluster: Cluster) -> list[int]:
    """The requests that run at each registered PD worker."""
    ports = [worker.capacity["metrics_port"] for worker in cluster.workers() if worker.pool == "pd"]
    pages = [scrape(f"http://127.0.0.1:{port}/metrics") for port in ports]
    return [int(page["vllm:num_requests_running"]) for page in pages]


@pytest.mark.slow
async def test_a_role_grows_with_its_own_work_and_shrinks_after_it(start, cases, reference):
    texts = [index for index, case in enumerate(cases) if not case.encoded][:4]
    crowd = [cases[index] for index in texts]
    roles = ("--prefill-workers", "1", "--decode-workers", "1..2", "--prefill-threshold", "0")
    cluster = scaled(start, *roles, "--max-num-seqs", "2", tower=0.0, step=0.1)
    assert sorted(cluster.pids("pd")) == ["pd-0", "pd-1"]
    async with Streams(cluster.url, crowd, 100, ["grow"]) as streams:
        await hold("a second decode worker", lambda: "pd-2" in cluster.pids("pd"), streams)
        got = await streams.all()
    assert_exact([reference[index] for index in texts], [answer.token_ids for answer in got])
    await hold("one decode worker again", lambda: sorted(cluster.pids("pd")) == ["pd-0", "pd-1"])
    told = re.findall(r"pd;role=(\w+) pool of (\d) \(\w+\): (.*)", cluster.log.read_text(errors="replace"))
    assert told == [("decode", "1", "start pd-2"), ("decode", "2", "drain pd-2")]


async def _decide(cluster: Cluster, pool: str, workers: int) -> None:
    """Keeps a decision in force that the proxy has not made, in place of each of the proxy's own."""
    store = await EmbeddingStore.connect(cluster.store_url)
    board = ScalingBoard(store)
    try:
        while True:
            # What is in force has to be read before, and the rules, which stay as they are.
            await board.agree(pool, ScalingRules(0, 1, 1.0), None, 0.0)
            await board.decision(pool)
            await board.announce(pool, ScalingDecision(workers, "test", active=True), 5.0)
            await asyncio.sleep(0.05)
    finally:
        await store.close()
