"""Real engines: an answer that is handed over is that of one worker, whatever is asked for."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from support.data.checkpoints import build_checkpoint
from support.data.traffic import WORDS
from support.engine.pd_serving import ServedPD, model_at
from support.engine.sharing import FEW, HITS, LOADED, QUERIES, wait_for_blocks
from support.engine.slow_steps import slow_steps
from support.fakes.fake_workers import MODEL
from support.fakes.proxy_fakes import FakeCluster, raw_post
from support.matrix import matrix
from support.waiting import until
from support.zoo.checkpoint import checkpoint
from triptych.pd_worker.native import LoadedModel
from triptych.store.embedding_store import EmbeddingStore

#: A prompt as text has fewer tokens than this by the proxy's estimate; as token ids it has more.
THRESHOLD = 90
PROMPT = " ".join(WORDS * 5)[:320]
TOKENS = 200
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 54, "top_p": 0.9, "top_k": FEW},
    "several choices": {"temperature": 0.8, "seed": 7, "n": 3, "top_k": FEW},
    "log-probabilities": {"temperature": 0, "logprobs": 2},
    "penalties": {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    "a form": {"temperature": 0, "guided_regex": "[a-e]{150,240}"},
    "a JSON schema": {
        "temperature": 0,
        "guided_json": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "string", "minLength": 120, "maxLength": 200},
            },
            "required": ["a", "b"],
        },
    },
    "bad words": {"temperature": 0, "bad_words": ["import", "a"]},
}


#: DeepStack; a dense one; a hybrid; spans and windows; experts.
CLASSES = (
    "qwen3_vl",
    "llava",
    *(f"{name}ForConditionalGeneration" for name in ("Qwen3_5", "Gemma3", "Qwen3VLMoe")),
)


@pytest.fixture(scope="module", params=matrix(CLASSES))
def models(request: pytest.FixtureRequest) -> list[LoadedModel]:
    """One for each worker: their engines are threads of this process."""
    name: str = request.param
    folder = checkpoint(name) if name.endswith("Generation") else build_checkpoint(name)
    return [model_at(str(folder), state_memory=16 << 20) for _ in range(2)]


@pytest.fixture
async def cluster(
    store: EmbeddingStore, store_url: str, models: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FakeCluster]:
    wait_for_blocks(monkeypatch)
    cluster = FakeCluster(store, pd_workers=0, prefill_threshold=THRESHOLD, request_timeout=50.0)
    workers = [ServedPD(*each) for each in zip(models, [store_url] * 2, ("prefill", "decode"), strict=True)]
    cluster.pd_workers = cast("list[Any]", workers)
    async with cluster:
        assert workers[0].worker is not None
        # It is never done before the decode worker takes over.
        slow_steps(workers[0].worker.engine)
        yield cluster
        await cluster.at_rest()


async def post(cluster: FakeCluster, path: str, **body: Any) -> dict[str, Any]:
    status, _, raw = await raw_post(
        cluster.port, json.dumps(body).encode(), {"Content-Type": "application/json"}, path
    )
    reply: dict[str, Any] = json.loads(raw)
    assert status == 200, reply
    return reply


def hand_overs(cluster: FakeCluster) -> float:
    [family] = cluster.metrics.hand_overs.collect()
    taken = (s.value for s in family.samples if s.name.endswith("_total") and s.labels["result"] == "taken")
    return sum(taken)


def counted(cluster: FakeCluster) -> Counter[str]:
    """What both workers' metrics say of their prefix caches."""
    workers: list[Any] = list(cluster.pd_workers)
    registries = [each.worker.engine._metrics._metrics.registry for each in workers]
    labels = {"model_name": MODEL}
    return Counter(
        {
            name: sum(int(each.get_sample_value(name, labels) or 0) for each in registries)
            for name in (HITS, QUERIES)
        }
    )


def loaded_tokens(cluster: FakeCluster) -> float:
    """Tokens whose KV the decode worker has found in the store."""
    worker: Any = cluster.pd_workers[1]
    registry = worker.worker.engine._metrics._metrics.registry
    return float(registry.get_sample_value(LOADED, {"model_name": MODEL}) or 0.0)


async def both(cluster: FakeCluster, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reply of one worker, and one that begins at the other and is handed over."""
    ids = (await post(cluster, "/tokenize", prompt=PROMPT))["tokens"]
    assert len(PROMPT) // 4 < THRESHOLD <= len(ids)
    before = hand_overs(cluster)
    body["max_tokens"] = TOKENS
    # Of another salt each: none finds what another one has computed.
    whole = await post(cluster, "/v1/completions", prompt=PROMPT, cache_salt=uuid.uuid4().hex, **body)
    assert hand_overs(cluster) == before
    loaded = loaded_tokens(cluster)
    handed = await post(cluster, "/v1/completions", prompt=ids, cache_salt=uuid.uuid4().hex, **body)
    assert hand_overs(cluster) > before
    assert loaded_tokens(cluster) >= loaded + len(ids) // 16 * 16, "the prompt was computed twice"
    return whole, handed


@pytest.mark.parametrize("feature", FEATURES)
async def test_an_answer_is_that_of_one_worker_whatever_is_asked_for(
    cluster: FakeCluster, feature: str
) -> None:
    whole, handed = await both(cluster, return_token_ids=True, **FEATURES[feature])
    for one, other in zip(handed["choices"], whole["choices"], strict=True):
        found, expected = one.pop("logprobs", None), other.get("logprobs")
        assert one == {name: value for name, value in other.items() if name != "logprobs"}
        # Equal but for the last digits: a chunk and a decode add up in another order.
        assert (found and found["tokens"]) == (expected and expected["tokens"])
        if found:
            assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-3)
    assert handed["usage"] == whole["usage"]


async def test_as_cached_counts_what_was_here_before_the_prompt_was_computed(cluster: FakeCluster) -> None:
    """Once for a prompt that is new, once for one that is not, and once for one that goes on."""
    salt = uuid.uuid4().hex
    ids = (await post(cluster, "/tokenize", prompt=PROMPT))["tokens"]
    body = {"max_tokens": TOKENS, "temperature": 0, "cache_salt": salt}
    for prompt, cached in ((ids, 0), (ids, (len(ids) - 1) // 16 * 16), ([*ids, *ids], len(ids) // 16 * 16)):
        before, metrics = hand_overs(cluster), counted(cluster)
        reply = await post(cluster, "/v1/completions", prompt=prompt, **body)
        assert hand_overs(cluster) > before
        assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
        found = counted(cluster) - metrics
        assert found == Counter({HITS: cached, QUERIES: len(prompt)}), "each prompt once, at both workers"


async def test_a_stop_string_ends_the_answer_where_one_worker_ends_it(cluster: FakeCluster) -> None:
    free = await post(cluster, "/v1/completions", prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    text = free["choices"][0]["text"]
    late = (
        text[at : at + 4] for at in range(len(text) * 2 // 3, len(text)) if text.find(text[at : at + 4]) == at
    )
    if (stop := next((part for part in late if part.isascii()), None)) is None:
        pytest.skip("this class repeats itself: nothing comes late for the first time")
    whole, handed = await both(cluster, temperature=0, stop=[stop])
    assert handed["choices"] == whole["choices"]
    assert handed["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("dies", [0, 1], ids=["prefill worker", "decode worker"])
async def test_a_worker_that_dies_while_others_requests_change_hands_changes_no_answer(
    cluster: FakeCluster, dies: int
) -> None:
    body = {"max_tokens": TOKENS, "temperature": 1.0, "seed": 3, "top_k": FEW, "return_token_ids": True}
    prompts = [f"{number} {PROMPT}"[:320] for number in range(8)]
    ids = [(await post(cluster, "/tokenize", prompt=prompt))["tokens"] for prompt in prompts]
    whole = [await post(cluster, "/v1/completions", prompt=prompt, **body) for prompt in prompts]
    before = hand_overs(cluster)
    asked = [
        asyncio.create_task(
            post(cluster, "/v1/completions", prompt=each, cache_salt=uuid.uuid4().hex, **body)
        )
        for each in ids
    ]
    await until(lambda: hand_overs(cluster) > before, "the first hand-over")
    assert not all(task.done() for task in asked)
    await cluster.pd_workers[dies].kill()
    answers = await asyncio.gather(*asked)
    assert [each["choices"] for each in answers] == [each["choices"] for each in whole]
