"""A PD worker of two ranks, by `triptych serve --tensor-parallel 2`: the tokens of transformers' generate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.chaos.rest import assert_at_rest
from support.data import traffic
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.pictures import picture
from support.encdec import traffic as encdec_traffic
from support.encdec.oracle import tokenizer_of
from support.encdec.traffic import EncDecCase
from support.processes.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = ("--threads", "1", "--tensor-parallel", "2")
TOKENS = 64
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3_vl", tmp_path_factory.mktemp("ranks") / "qwen3_vl")


@pytest.fixture(scope="module")
def ranked(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ("--max-num-batched-tokens", "33", "--block-size", "8")
    with running_cluster(checkpoint, tmp_path_factory.mktemp("two"), *RANKS, *flags) as cluster:
        yield cluster


async def test_pictures_and_texts_at_once_are_answered_as_by_generate(
    ranked: Cluster, checkpoint: Path
) -> None:
    cases = traffic.mixed_cases(16, seed=11)
    reference = traffic.expected(checkpoint, cases, TOKENS)
    for _ in range(2):  # the second time with a prefix that the first has left
        got = await traffic.ask_all(ranked.url, cases, TOKENS)
        assert_exact(reference, [answer.token_ids for answer in got])
    assert ranked.total("pd", "triptych_pd_ranks") == 2
    assert ranked.total("pd", "vllm:prefix_cache_hits_total") > 0
    assert ranked.total("pd", "triptych_pd_chunked_prefills_total") > 0
    await asyncio.to_thread(assert_at_rest, ranked)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
async def test_every_family_with_placeholders_is_exact(family: str, tmp_path: Path) -> None:
    path = build_checkpoint(family, tmp_path / family)
    cases = traffic.mixed_cases(8, seed=5)
    reference = traffic.expected(path, cases, TOKENS)
    with running_cluster(path, tmp_path / "run", *RANKS) as cluster:
        got = await traffic.ask_all(cluster.url, cases, TOKENS)
        assert_exact(reference, [answer.token_ids for answer in got])
        await asyncio.to_thread(assert_at_rest, cluster)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
async def test_preempted_requests_are_answered_alike(
    checkpoint: Path, preemption: str, tmp_path: Path
) -> None:
    cases = traffic.mixed_cases(16, seed=4)
    tokens = 4 * TOKENS
    reference = traffic.expected(checkpoint, cases, tokens)
    # A block of 16 tokens is 12 KiB, of which each rank has a half: 80 blocks, as with one rank.
    memory = ("--kv-memory", "960KiB", "--max-model-len", "512", "--preemption", preemption)
    with running_cluster(checkpoint, tmp_path / "run", *RANKS, *memory, "--swap-memory", "64MiB") as cluster:
        got = await traffic.ask_all(cluster.url, cases, tokens)
        assert_exact(reference, [answer.token_ids for answer in got])
        assert cluster.total("pd", "vllm:num_preemptions_total") > 0
        assert (cluster.total("pd", "triptych_pd_swapped_blocks_total") > 0) is (preemption == "swap")
        await asyncio.to_thread(assert_at_rest, cluster)


def body(**extra: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Say what you like."}
    return {"messages": [message], "max_tokens": 24, "return_token_ids": True, **extra}


ASKED = {
    "seeds": {"temperature": 1.0, "seed": 11, "n": 3},
    "cuts": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 5},
    "penalties": {
        "temperature": 0,
        "presence_penalty": 1.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
    },
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA},
        },
        "max_tokens": 120,
        "temperature": 1.0,
        "seed": 3,
    },
    "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 4},
}


def test_what_is_sampled_from_two_ranks_is_what_is_sampled_from_one(
    ranked: Cluster, checkpoint: Path, tmp_path: Path
) -> None:
    with running_cluster(checkpoint, tmp_path / "one", "--threads", "1") as one:
        assert one.total("pd", "triptych_pd_ranks") == 1
        for name, extra in ASKED.items():
            replies = [cluster.post(body(**extra)) for cluster in (one, ranked)]
            assert [reply["status"] for reply in replies] == [200, 200], (name, replies)
            ids = [[choice["token_ids"] for choice in reply["choices"]] for reply in replies]
            assert ids[0] == ids[1], name
            if name == "logprobs":
                first, second = (_logprobs(reply) for reply in replies)
                assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(first, second, strict=True))


def _logprobs(reply: dict[str, Any]) -> list[float]:
    content = reply["choices"][0]["logprobs"]["content"]
    return [top["logprob"] for token in content for top in (token, *token["top_logprobs"])]


TEXTS = ("The rain in Spain", "x", "A red circle beside a blue square", "Hi you")
ENCDEC: dict[str, Any] = {
    "whisper": [(1.0 + seed, seed) for seed in range(6)],
    "bart": TEXTS,
    "mbart": TEXTS,
    "t5": TEXTS,
    "trocr": [picture(seed, 70 + 9 * seed, 40) for seed in range(4)],
}


@pytest.mark.parametrize("family", list(ENCDEC))
async def test_every_encoder_decoder_family_is_exact(family: str, tmp_path: Path) -> None:
    path = build_checkpoint(family, tmp_path / family, variant="even" if family == "t5" else "")
    cases = [EncDecCase(source, _prompt(path, family)) for source in ENCDEC[family]]
    tokens = 40
    reference = encdec_traffic.expected(path, cases, tokens)
    with running_cluster(path, tmp_path / "run", *RANKS) as cluster:
        got = await asyncio.gather(*(encdec_traffic.ask(cluster.url, case, tokens) for case in cases))
        assert_exact(reference, [answer.token_ids for answer in got], min_distinct=5)
        await asyncio.to_thread(assert_at_rest, cluster)


def _prompt(path: Path, family: str) -> tuple[int, ...]:
    if family == "whisper":
        words = "<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>"
        return tuple(tokenizer_of(path).convert_tokens_to_ids(words.split()))
    return (2, 0) if family == "bart" else (2,)
