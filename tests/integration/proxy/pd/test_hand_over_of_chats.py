"""Real engines: calls and reasoning that are handed over are those of one worker, in their deltas too."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from support.data.reasoning import reasoning_checkpoint
from support.engine.pd_serving import ServedPD, model_at
from support.engine.sharing import FEW, LOADED, hold
from support.fakes.fake_workers import MODEL, user
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.pd_worker.native import LoadedModel
from triptych.store.embedding_store import EmbeddingStore

#: Chats are handed over from this many estimated tokens on, or never.
ALL, NONE = 0, 100_000
CHAT = user("What is the weather like, and what would you wear on a day like this one?")
TOKENS = 220
NOTE = {
    "type": "object",
    "properties": {"note": {"type": "string", "minLength": 120, "maxLength": 180}},
    "required": ["note"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "write_down", "parameters": NOTE}}
FORM = {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE, "strict": True}}
#: The request changes hands in mid-thought, or in the call, which soon follows.
LONG, SHORT = 60, 2
FORCED: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
NAMED: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "write_down"}},
}
ASKED: dict[str, tuple[int, dict[str, Any]]] = {
    "a forced call": (SHORT, FORCED),
    "a named call": (SHORT, NAMED),
    "reasoning and an answer": (LONG, {"response_format": FORM}),
    "reasoning and a forced call": (LONG, FORCED),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedModel]:
    """One for each worker: their engines are threads of this process."""
    folder = reasoning_checkpoint(tmp_path_factory.mktemp("reasons"))
    return [model_at(str(folder)) for _ in range(2)]


@pytest.fixture
async def cluster(
    store: EmbeddingStore, store_url: str, models: list[LoadedModel]
) -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster(store, pd_workers=0)
    workers = [ServedPD(*each) for each in zip(models, [store_url] * 2, ("prefill", "decode"), strict=True)]
    cluster.pd_workers = cast("list[Any]", workers)
    async with cluster:
        taken = threading.Event()
        assert workers[0].worker is not None
        hold(workers[0].worker.engine, taken)
        over = asyncio.create_task(until(lambda: hand_overs(cluster) > 0, "a hand-over", 60.0))
        over.add_done_callback(lambda _: taken.set())
        yield cluster
        await over
        await cluster.at_rest()


async def chat(cluster: FakeCluster, threshold: int, budget: int, **asked: Any) -> dict[str, Any]:
    """What a client puts together of the deltas of a stream."""
    cluster.dispatcher._router._choice._threshold = threshold
    # Of another salt each: none finds what another one has computed.
    body = {"thinking_token_budget": budget, "cache_salt": uuid.uuid4().hex, "top_k": FEW}
    chunks = await cluster.client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=TOKENS,
        seed=54,
        top_p=0.9,
        stream=True,
        extra_body=body,
        **asked,
    )
    got = {"reasoning": "", "content": "", "name": "", "arguments": "", "end": ""}
    async for chunk in chunks:
        for choice in chunk.choices:
            got["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            got["content"] += choice.delta.content or ""
            got["end"] += choice.finish_reason or ""
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                got["name"] += call.function.name or ""
                got["arguments"] += call.function.arguments or ""
    return got


def hand_overs(cluster: FakeCluster) -> float:
    [family] = cluster.metrics.hand_overs.collect()
    return sum(s.value for s in family.samples if s.name.endswith("_total") and s.labels["result"] == "taken")


def loaded_tokens(cluster: FakeCluster) -> float:
    """Tokens whose KV the decode worker has found in the store."""
    worker: Any = cluster.pd_workers[1]
    registry = worker.worker.engine._metrics._metrics.registry
    return float(registry.get_sample_value(LOADED, {"model_name": MODEL}) or 0.0)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", ASKED)
async def test_what_a_client_reads_of_a_chat_is_that_of_one_worker(
    cluster: FakeCluster, name: str, temperature: float
) -> None:
    budget, asked = ASKED[name]
    whole = await chat(cluster, NONE, budget, temperature=temperature, **asked)
    assert hand_overs(cluster) == 0
    assert whole["end"] == ("tool_calls" if "tools" in asked else "stop")
    assert whole["reasoning"]
    assert len(whole["arguments"] + whole["content"]) > 120
    handed = await chat(cluster, ALL, budget, temperature=temperature, **asked)
    assert hand_overs(cluster) == 1
    assert loaded_tokens(cluster) > 0, "the prompt was computed twice"
    assert handed == whole
