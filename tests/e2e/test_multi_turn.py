"""Chats whose embeddings the store loses between the turns: the PD worker's KV cache has the pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.chaos import stages
from support.chaos.rest import assert_at_rest
from support.data.checkpoints import build_checkpoint
from support.data.conversation import Conversation, lose_embeddings
from support.data.oracle import assert_exact
from support.data.traffic import Answer, picture
from support.encdec import traffic as encdec_traffic
from support.encdec.oracle import tokenizer_of
from support.encdec.traffic import EncDecCase
from support.matrix import matrix
from support.processes.cluster import Cluster, running_cluster

pytestmark = pytest.mark.timeout(300)

TOKENS = 24
#: More tokens than the largest block has, so that every block with a picture's end is full.
QUESTION = "class list while print value name open self return import os " * 4


def jobs(cluster: Cluster) -> int:
    return int(cluster.total("proxy", "triptych_encoder_jobs_total"))


async def turn(
    cluster: Cluster, chat: Conversation, path: Path, text: str, pictures: Sequence[Any] = (), model: str = ""
) -> tuple[Answer, int]:
    """The exact answer to one question more, before which the store has lost everything; its encoder jobs."""
    await asyncio.to_thread(lose_embeddings, cluster)
    before = jobs(cluster)
    chat.say(text + QUESTION, *pictures)
    reference = chat.expected(path, TOKENS)
    answer = await chat.turn(cluster, TOKENS, model)
    assert answer.prompt_token_ids == reference.prompt_token_ids
    assert_exact([reference], [answer.token_ids], min_distinct=1)
    return answer, jobs(cluster) - before


def caches(answer: Answer) -> list[str]:
    """Where the items came from."""
    return [item["cache"] for item in answer.timings["items"]]


@pytest.mark.parametrize("family", matrix(["qwen3_vl", "llava", "qwen2_5_vl"]))
async def test_every_picture_of_a_growing_chat_is_encoded_once(families, family):
    cluster, path, chat = families.cluster, families.checkpoints[family], Conversation()
    first, second = (picture(4000 + seed, 96, 64) for seed in range(2))
    answer, made = await turn(cluster, chat, path, "What is this? ", [first], family)
    assert (made, caches(answer)) == (1, ["encoded"])
    answer, made = await turn(cluster, chat, path, "And why? ", (), family)
    assert (made, caches(answer)) == (0, ["pd"])
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    answer, made = await turn(cluster, chat, path, "And this? ", [second], family)
    assert (made, caches(answer)) == (1, ["pd", "encoded"])
    answer, made = await turn(cluster, chat, path, "Compare them. ", (), family)
    assert (made, caches(answer)) == (0, ["pd", "pd"])


async def test_while_all_encoders_stand_still_a_turn_without_a_new_picture_is_answered(families):
    cluster, path, chat = families.cluster, families.checkpoints["qwen3_vl"], Conversation()
    await turn(cluster, chat, path, "What is this? ", [picture(4200, 64, 64)], "qwen3_vl")
    with stages.stopped(cluster, "encoder"):
        answer, made = await turn(cluster, chat, path, "And why? ", (), "qwen3_vl")
    assert (made, caches(answer)) == (0, ["pd"])


@pytest.mark.slow
async def test_a_second_task_on_a_sound_needs_no_job_while_its_cross_table_is_there(tmp_path):
    path = build_checkpoint("whisper", tmp_path / "whisper")
    tokenizer = tokenizer_of(path)
    asked = [
        EncDecCase((1.0, 3), tuple(tokenizer.convert_tokens_to_ids(words.split())))
        for words in (
            "<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>",
            "<|startoftranscript|> <|en|> <|translate|> <|notimestamps|>",
        )
    ]
    reference = encdec_traffic.expected(path, asked, TOKENS)
    with running_cluster(path, tmp_path / "run", "--threads", "1") as cluster:
        got = []
        for case in asked:
            await asyncio.to_thread(lose_embeddings, cluster)
            got.append(await encdec_traffic.ask(cluster.url, case, TOKENS))
        assert_exact(reference, [answer.token_ids for answer in got], min_distinct=1)
        assert jobs(cluster) == 1
        await asyncio.to_thread(assert_at_rest, cluster)
