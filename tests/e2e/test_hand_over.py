"""One prefill and one decode worker beside each other give the tokens of generate, and of one worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.chaos.rest import assert_at_rest
from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS, WORDS, ask_all, expected, mixed_cases
from support.processes.cluster import Cluster, running_cluster

#: Of the text a prompt has half as many tokens by the proxy's estimate as by the tokenizer.
THRESHOLD = 90
ROLES = ("--prefill-workers", "1", "--decode-workers", "1", "--threads", "1", "--prefill-threshold")
PROMPT = " ".join(WORDS * 5)[:320]
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 54, "top_p": 0.9},
    "several choices": {"temperature": 0.8, "seed": 7, "n": 3},
    "log-probabilities": {"temperature": 0, "logprobs": 2},
    "penalties": {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    "a form": {"temperature": 0, "guided_regex": "[a-e]{30,60}"},
    "a JSON schema": {
        "temperature": 0,
        "guided_json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 40}},
            "required": ["a", "b"],
        },
    },
    "bad words": {"temperature": 0, "bad_words": ["import", "a"]},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3_vl", tmp_path_factory.mktemp("roles") / "qwen3_vl")


@pytest.fixture(scope="module")
def cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(checkpoint, tmp_path_factory.mktemp("run"), *ROLES, str(THRESHOLD)) as cluster:
        yield cluster


def hand_overs(cluster: Cluster) -> float:
    return cluster.total("proxy", "triptych_hand_overs_total")


async def test_36_requests_at_once_are_handed_over_and_get_the_tokens_of_generate(
    cluster: Cluster, checkpoint: Path
) -> None:
    cases = [case for case in mixed_cases(96, seed=15, sizes=((320, 320), (256, 384))) if case.images][:36]
    answers = await ask_all(cluster.url, cases, STREAM_TOKENS)
    assert_exact(expected(checkpoint, cases, STREAM_TOKENS), [answer.token_ids for answer in answers])
    assert hand_overs(cluster) >= len(cases)
    assert cluster.total("proxy", "triptych_resumes_total") == 0, "a hand-over is no loss"
    assert_at_rest(cluster)


@pytest.mark.parametrize("feature", FEATURES)
def test_an_answer_is_that_of_one_worker_whatever_is_asked_for(cluster: Cluster, feature: str) -> None:
    """The same prompt as text, which is short by estimate, and as token ids, which are counted."""
    ids = cluster.post({"prompt": PROMPT}, path="/tokenize")["tokens"]
    assert len(PROMPT) // 4 < THRESHOLD <= len(ids)
    body = {"max_tokens": 60, "return_token_ids": True, **FEATURES[feature]}
    before = hand_overs(cluster)
    whole = cluster.post({"prompt": PROMPT, **body}, path="/v1/completions")
    assert hand_overs(cluster) == before
    handed = cluster.post({"prompt": ids, **body}, path="/v1/completions")
    assert hand_overs(cluster) > before, handed
    assert handed["choices"] == whole["choices"]
    assert handed["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_a_stop_string_across_the_hand_over_ends_the_answer_where_one_worker_ends_it(
    cluster: Cluster,
) -> None:
    ids = cluster.post({"prompt": PROMPT}, path="/tokenize")["tokens"]
    free = cluster.post({"prompt": PROMPT, "max_tokens": 60, "temperature": 0}, path="/v1/completions")
    text = free["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    body = {"max_tokens": 60, "temperature": 0, "stop": [stop]}
    replies = [cluster.post({"prompt": given, **body}, path="/v1/completions") for given in (PROMPT, ids)]
    assert replies[0]["choices"] == replies[1]["choices"]
    assert replies[1]["choices"][0]["finish_reason"] == "stop"
