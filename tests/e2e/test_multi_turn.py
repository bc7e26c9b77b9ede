"""Chats whose embeddings the store loses between the turns: the PD worker's KV cache has the pictures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from support.chaos import stages
from support.chaos.rest import assert_at_rest
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import Answer, ask, picture
from support.encdec import traffic as encdec_traffic
from support.encdec.oracle import tokenizer_of
from support.encdec.traffic import EncDecCase
from support.matrix import matrix
from support.processes.cluster import PATIENCE, Cluster, data_url, running_cluster
from triptych.store import keys

pytestmark = pytest.mark.timeout(300)


@dataclass
class Conversation:
    """The history of one chat: user and assistant in turn. A `Case` for `ask`."""

    history: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[Any] = field(default_factory=list)

    def say(self, text: str, *pictures: Any) -> None:
        """The user's next message, its pictures first."""
        self.pictures += pictures
        parts = [{"type": "image"} for _ in pictures]
        self.history.append({"role": "user", "content": [*parts, {"type": "text", "text": text}]})

    def oracle_messages(self) -> list[dict[str, Any]]:
        return self.history

    def client_messages(self) -> list[dict[str, Any]]:
        pictures = iter(self.pictures)
        return [self._sent(message, pictures) for message in self.history]

    def _sent(self, message: dict[str, Any], pictures: Any) -> dict[str, Any]:
        if message["role"] == "assistant":
            return {"role": "assistant", "content": message["content"][0]["text"]}
        parts = [
            {"type": "image_url", "image_url": {"url": data_url(next(pictures))}}
            if part["type"] == "image"
            else part
            for part in message["content"]
        ]
        return {"role": "user", "content": parts}

    async def turn(self, cluster: Cluster, tokens: int, model: str = "", **extra: Any) -> Answer:
        """The answer to all so far, which becomes the history's last message."""
        answer = await ask(cluster.url, self, tokens, model, **extra)  # type: ignore[arg-type]
        self.history.append({"role": "assistant", "content": [{"type": "text", "text": answer.text}]})
        return answer

    def expected(self, path: Path, tokens: int) -> Any:
        """The oracle's answer to all so far; asked before `turn`."""
        from support.data.oracle import oracle

        return oracle(path, self.oracle_messages(), self.pictures, max_new_tokens=tokens)


def lose_embeddings(cluster: Cluster) -> None:
    """The store loses all embeddings, and nothing else."""
    with redis.Redis.from_url(cluster.store_url, socket_timeout=PATIENCE) as client:
        for key in list(client.scan_iter(match=f"{keys.EMBEDDING}*", count=1000)):
            client.delete(key)


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
    cluster, path, chat = families.cluster, families.checkpoint(family), Conversation()
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
    cluster, path, chat = families.cluster, families.checkpoint("qwen3_vl"), Conversation()
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
