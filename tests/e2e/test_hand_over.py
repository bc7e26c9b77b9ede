"""One prefill and one decode worker beside each other give the tokens of generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chaos.rest import assert_at_rest
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS, ask_all, expected, mixed_cases
from support.processes.cluster import Cluster, running_cluster
from support.processes.families import assert_family_exact

TOKENS = STREAM_TOKENS
ROLES = ("--prefill-workers", "1", "--decode-workers", "1", "--prefill-threshold", "0", "--threads", "1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3_vl", tmp_path_factory.mktemp("roles") / "qwen3_vl")


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(checkpoint, tmp_path_factory.mktemp("run"), *ROLES) as cluster:
        yield cluster


async def test_36_requests_at_once_are_handed_over_and_get_the_tokens_of_generate(
    cluster: Cluster, checkpoint: Path
) -> None:
    cases = mixed_cases(36, seed=15, sizes=((160, 160), (128, 192)))
    answers = await ask_all(cluster.url, cases, TOKENS)
    assert_exact(expected(checkpoint, cases, TOKENS), [answer.token_ids for answer in answers])
    assert_handed_over(cluster)
    assert_found(cluster)
    assert_at_rest(cluster)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["t5", "whisper"])
async def test_encoder_decoder_families_are_handed_over_and_answer_as_generate(
    family: str, tmp_path: Path
) -> None:
    path = build_checkpoint(family, tmp_path / family)
    with running_cluster(path, tmp_path / "run", *ROLES) as cluster:
        await assert_family_exact(cluster, family, path)
        assert_handed_over(cluster)
        assert_at_rest(cluster)


def assert_handed_over(cluster: Cluster) -> None:
    [proxy] = cluster.metrics("proxy")
    # A decode worker without room, or too late, leaves others where they are: how many, the machine decides.
    assert proxy["triptych_hand_overs_total"] > 0
    assert proxy.get("triptych_resumes_total", 0.0) == 0.0, "a hand-over is no loss"


def assert_found(cluster: Cluster) -> None:
    """The decode worker has loaded what the prefill worker computed."""
    workers = cluster.metrics("pd")
    saved, loaded = (
        max(worker.get(f"triptych_pd_shared_kv_{what}_tokens_total", 0.0) for worker in workers)
        for what in ("saved", "loaded")
    )
    assert saved > 0
    # How much of it, the machine decides: what comes too late is computed, too.
    assert loaded > 0, "right answers prove nothing: what is not found is computed"
