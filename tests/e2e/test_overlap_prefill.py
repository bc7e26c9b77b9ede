"""Prompts that are prefilled while their later pictures are encoded give the tokens of generate."""

from __future__ import annotations

import asyncio
import random

import pytest

from support.chaos import stages
from support.chaos.rest import assert_at_rest
from support.chaos.streams import Streams
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import WORDS, Case, expected, picture
from support.processes.cluster import running_cluster

TOKENS = 96
#: One picture at a time goes through the tower; small steps and blocks.
WORDS_OF_SERVE = ("--threads", "1", "--encoder-batch-patches", "1", "--block-size", "8",
                  "--max-num-batched-tokens", "48")  # fmt: skip

pytestmark = pytest.mark.timeout(300)


def albums(count: int) -> list[Case]:
    """Three pictures each, the first at the prompt's begin: hardly any text can be prefilled without it."""
    rng = random.Random(3)

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=16)) + f" {rng.randrange(1000)}"

    return [
        Case(
            (0, text(), 1, 2, text()),
            tuple(picture(100 * index + i, 160, 160 + 32 * i) for i in range(3)),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_vl",
        pytest.param("qwen2_5_vl", marks=pytest.mark.slow),
        pytest.param("llava", marks=pytest.mark.slow),
    ],
)
async def test_answers_are_exact_where_prompts_are_prefilled_between_two_of_their_pictures(family, tmp_path):
    checkpoint, cases = build_checkpoint(family, tmp_path / family), albums(4)
    reference = expected(checkpoint, cases, TOKENS)
    with running_cluster(checkpoint, tmp_path / "run", *WORDS_OF_SERVE) as cluster:
        async with (
            stages.slowed(cluster, "encoder"),
            Streams(cluster.url, cases, TOKENS, ["slowly"]) as streams,
        ):
            answers = await streams.all()
        assert_exact(reference, [answer.token_ids for answer in answers], min_distinct=15)
        assert 0 < cluster.total("pd", "triptych_pd_overlap_requests_total") <= len(cases)
        assert cluster.total("pd", "triptych_pd_overlap_tokens_total") > 0
        assert {answer.usage.prompt_tokens_details.cached_tokens for answer in answers} == {0}
        await asyncio.to_thread(assert_at_rest, cluster)


@pytest.mark.slow
async def test_without_the_flag_prompts_wait_for_all_of_their_pictures(tmp_path):
    checkpoint, cases = build_checkpoint("qwen3_vl", tmp_path / "model"), albums(2)
    reference = expected(checkpoint, cases, TOKENS)
    words = (*WORDS_OF_SERVE, "--no-overlap-prefill")
    with running_cluster(checkpoint, tmp_path / "run", *words) as cluster:
        async with (
            stages.slowed(cluster, "encoder"),
            Streams(cluster.url, cases, TOKENS, ["slowly"]) as streams,
        ):
            answers = await streams.all()
        assert_exact(reference, [answer.token_ids for answer in answers], min_distinct=15)
        assert cluster.total("pd", "triptych_pd_overlap_tokens_total") == 0
