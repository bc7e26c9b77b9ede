"""A colocated replica, of one rank or of several on both sides, answers as the separated workers do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.chaos import faults, stages
from support.chaos.streams import Streams
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import ask_all, expected, mixed_cases
from support.processes.cluster import Cluster, running_cluster

TOKENS = 64

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Replica:
    cluster: Cluster
    checkpoint: Path
    ranks: int


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one rank", "two ranks"]
)
def replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    folder = tmp_path_factory.mktemp("colocated")
    path = build_checkpoint("qwen3_vl", folder / "qwen3_vl")
    words = ("--topology", "colocated", "--threads", "1", "--max-num-batched-tokens", "48")
    words += ("--tensor-parallel", f"{request.param}", "--encoder-data-parallel", f"{request.param}")
    environment = faults.gated(folder / "run")
    with running_cluster(path, folder / "run", *words, environment=environment) as cluster:
        yield Replica(cluster, path, request.param)


async def test_text_and_pictures_at_once_are_exact(replica):
    cases = mixed_cases(8, seed=41)
    reference = expected(replica.checkpoint, cases, TOKENS)
    answers = await ask_all(replica.cluster.url, cases, TOKENS)
    assert_exact(reference, [answer.token_ids for answer in answers])
    assert [a.prompt_token_ids for a in answers] == [r.prompt_token_ids for r in reference]
    for pool in ("encoder", "pd"):
        assert replica.cluster.total(pool, f"triptych_{pool}_ranks") == replica.ranks


async def test_a_killed_replica_comes_back_and_its_requests_go_on(replica):
    cluster = replica.cluster
    cases = mixed_cases(4, seed=47)
    reference = expected(replica.checkpoint, cases, 200)
    killed = cluster.pid("colocated-0")

    async def kill(streams):
        async with stages.caught(
            cluster, streams, "a stream in its middle", lambda: streams.in_the_middle > 0, "colocated"
        ):
            assert stages.unfinished(cluster) > 0
            cluster.kill("colocated-0")

    def crowd(number):
        return Streams(cluster.url, cases, 200, salts=(f"kill {number}",))

    answers = await stages.broken(crowd, nullcontext, kill)
    assert_exact(reference, [answer.token_ids for answer in answers])
    assert cluster.pid("colocated-0") != killed
