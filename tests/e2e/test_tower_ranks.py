"""`triptych serve --encoder-data-parallel 2`: the tokens of transformers' generate, for every family."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.chaos import stages
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.pictures import picture
from support.data.traffic import ask_all, expected, mixed_cases
from support.encdec import traffic as encdec_traffic
from support.encdec.oracle import tokenizer_of
from support.encdec.traffic import EncDecCase
from support.processes.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 64
#: Batches of several items, of the largest too.
TWO_RANKS = ("--threads", "1", "--encoders", "1", "--encoder-data-parallel", "2",
             "--encoder-batch-patches", "4096")  # fmt: skip
#: What each encoder-decoder family reads.
SOURCES: dict[str, Any] = {
    "whisper": [(1.0 + seed / 2, seed) for seed in range(8)],
    "trocr": [picture(seed, 70 + 9 * seed, 40) for seed in range(8)],
    "bart": [f"The rain in Spain falls {number} times" + " again" * number for number in range(8)],
    "mbart": [f"The rain in Spain falls {number} times" + " again" * number for number in range(8)],
    "t5": [f"The rain in Spain falls {number} times" + " again" * number for number in range(8)],
}


def _shares(cluster: Cluster) -> tuple[float, float]:
    """The items that were given to ranks, and those that a tower of one rank would have had."""
    total = cluster.total
    return (
        total("encoder", "triptych_encoder_rank_items_total"),
        total("encoder", "triptych_encoder_tower_items_total"),
    )


def _planned(cluster: Cluster) -> float:
    return cluster.total("encoder", "triptych_encoder_planned_items")


def _of_rank_1(cluster: Cluster) -> bool:
    """Whether rank 1 has had a share: one batch at least had two items."""
    total = cluster.total
    return total("encoder", "triptych_encoder_batch_items_sum") > total(
        "encoder", "triptych_encoder_batch_items_count"
    )


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "llava"])
async def test_pictures_that_two_ranks_encode_are_answered_as_by_generate(
    family: str, tmp_path: Path
) -> None:
    checkpoint = build_checkpoint(family, tmp_path / family)
    cases = mixed_cases(24, seed=11)
    reference = expected(checkpoint, cases, TOKENS)
    with running_cluster(checkpoint, tmp_path / "run", *TWO_RANKS) as cluster:
        answers = await ask_all(cluster.url, cases, TOKENS, model=family)
        assert_exact(reference, [answer.token_ids for answer in answers])
        given, encoded = _shares(cluster)
        assert given == encoded > 0
        assert _of_rank_1(cluster)


@pytest.mark.parametrize("family", SOURCES)
async def test_what_two_ranks_read_or_hear_is_answered_as_by_generate(family: str, tmp_path: Path) -> None:
    checkpoint = build_checkpoint(family, tmp_path / family)
    prompt = (2,)
    if family == "whisper":
        words = "<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>"
        prompt = tuple(tokenizer_of(checkpoint).convert_tokens_to_ids(words.split()))
    cases = [EncDecCase(source, prompt) for source in SOURCES[family]]
    reference = encdec_traffic.expected(checkpoint, cases, TOKENS)
    with running_cluster(checkpoint, tmp_path / "run", *TWO_RANKS) as cluster:
        asked = asyncio.gather(*(encdec_traffic.ask(cluster.url, case, TOKENS, family) for case in cases))
        # Nothing goes through the tower before a PD worker has admitted it: then all of them do.
        with stages.stopped(cluster, "pd"):
            await stages.hold("all to be planned", lambda: _planned(cluster) == len(cases))
        answers = await asked
        assert_exact(reference, [answer.token_ids for answer in answers])
        given, encoded = _shares(cluster)
        assert given == encoded == len(cases)
        assert _of_rank_1(cluster)
