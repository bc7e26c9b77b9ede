"""A PD worker of two ranks, by `triptych serve --tensor-parallel 2`, samples what one of one rank does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.data.checkpoints import build_checkpoint
from support.processes.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = ("--threads", "1", "--tensor-parallel", "2")
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


def test_what_is_sampled_from_two_ranks_is_what_is_sampled_from_one(ranked, checkpoint, tmp_path):
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
