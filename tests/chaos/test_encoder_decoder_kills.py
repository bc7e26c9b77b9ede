"""Kills, restarts and losses while sounds are encoded, projected and written down: every answer right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from support.chaos import stages
from support.chaos.rest import assert_at_rest
from support.chaos.streams import Streams
from support.data.checkpoints import build_checkpoint
from support.data.oracle import OracleResult, assert_exact
from support.data.traffic import Answer
from support.encdec import traffic as encdec_traffic
from support.encdec.oracle import tokenizer_of
from support.encdec.traffic import EncDecCase
from support.processes.cluster import PATIENCE, Cluster, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 80
SOUNDS = 20


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("whisper", tmp_path_factory.mktemp("chaos") / "whisper")


@pytest.fixture(scope="module")
def tasks(whisper: Path) -> list[EncDecCase]:
    """Every sound is written down and translated: two decoder prompts on one encoder output."""
    prompts = [
        tuple(tokenizer_of(whisper).convert_tokens_to_ids(words.split()))
        for words in (
            "<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>",
            "<|startoftranscript|> <|de|> <|translate|> <|notimestamps|>",
        )
    ]
    return [EncDecCase((1.0 + seed / 2, seed), prompt) for seed in range(SOUNDS) for prompt in prompts]


@pytest.fixture(scope="module")
def wanted(whisper: Path, tasks: list[EncDecCase]) -> list[OracleResult]:
    return encdec_traffic.expected(whisper, tasks, TOKENS)


@pytest.fixture(params=[1, 2], ids=["restart", "takeover"])
def cluster(whisper: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One worker of each kind, which comes back, or two, of which the other takes over."""
    pools = ("--encoders", str(request.param), "--pd-workers", str(request.param), "--threads", "1")
    small = ("--encoder-batch-patches", "1", "--max-queue", "100")
    with running_cluster(whisper, tmp_path / "run", *pools, *small) as cluster:
        yield cluster


def streams_of(cluster: Cluster, tasks: list[EncDecCase]) -> Streams:
    return Streams(cluster.url, tasks, TOKENS, [""], encdec_traffic.ask)


async def whole(cluster: Cluster, got: list[Answer], wanted: list[OracleResult]) -> None:
    assert_exact(wanted, [answer.token_ids for answer in got])
    assert {answer.finish_reason for answer in got} == {"length"}
    await asyncio.to_thread(assert_at_rest, cluster)


@pytest.mark.parametrize(
    "kill",
    [stages.kill_queued, stages.kill_encoding, stages.kill_saved, stages.kill_midstream],
    ids=["queued", "encoding", "saved", "midstream"],
)
async def test_a_kill_at_any_stage_loses_no_token_of_a_transcript(
    cluster: Cluster, tasks: list[EncDecCase], wanted: list[OracleResult], kill: Callable[..., Any]
) -> None:
    with stages.closed_gate(cluster):
        async with streams_of(cluster, tasks) as streams:
            await kill(cluster, streams)
            got = await streams.all()
    await whole(cluster, got, wanted)


@pytest.mark.parametrize("cluster", [1], indirect=True, ids=["one"])
async def test_a_store_flushed_between_encoding_and_loading_changes_no_transcript(
    cluster: Cluster, tasks: list[EncDecCase], wanted: list[OracleResult]
) -> None:
    with stages.closed_gate(cluster):
        async with streams_of(cluster, tasks) as streams:
            await stages.gathered(cluster, streams, streams.pictured)
            stages.open_gate(cluster)
            await stages.hold("an encoder output", lambda: _encoded(cluster) > 1, streams)
            with stages.stopped(cluster, "pd"):
                stages.assert_unfinished(cluster)
                _flush(cluster)
            got = await streams.all()
    await whole(cluster, got, wanted)


@pytest.mark.parametrize("cluster", [1], indirect=True, ids=["one"])
async def test_a_pd_worker_lost_together_with_the_store_has_everything_encoded_again(
    cluster: Cluster, tasks: list[EncDecCase], wanted: list[OracleResult]
) -> None:
    async with streams_of(cluster, tasks) as streams:
        await stages.hold("streams in the middle", lambda: streams.in_the_middle > 5, streams)
        with stages.stopped(cluster, "pd"):
            stages.assert_unfinished(cluster)
            before = _encoded(cluster)
            _flush(cluster)
            cluster.kill("pd-0")
        got = await streams.all()
    await whole(cluster, got, wanted)
    assert _encoded(cluster) > before, "neither tables nor stored outputs were left"


def _encoded(cluster: Cluster) -> float:
    return cluster.total("encoder", "triptych_encoder_tower_items_total")


def _flush(cluster: Cluster) -> None:
    with redis.Redis.from_url(cluster.store_url, socket_timeout=PATIENCE) as client:
        client.flushall()
