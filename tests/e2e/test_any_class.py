"""Classes without a family of their own through real processes: plain, with M-RoPE, and with spans."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.data.traffic import Answer, Case, ask
from support.processes.cluster import Cluster, start_cluster, wait_for
from support.waiting import within
from support.zoo.cases import assert_exact
from support.zoo.checkpoint import checkpoint
from support.zoo.own_processor import TEXT, pictures, reference

pytestmark = [
    pytest.mark.timeout(300),
    # By transformers, of its PIL processors.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

NAMES = tuple(f"{family}ForConditionalGeneration" for family in ("Glm4v", "AyaVision", "Gemma3"))
TOKENS = 32
LONG = 400


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    first, *others = NAMES
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        flags = ("--threads", "1", "--max-num-batched-tokens", "64", "--block-size", "8")
        running = start_cluster(checkpoint(first), Path(folder), "--served-model-name", first, *flags)
        try:
            for name in others:
                words = (str(checkpoint(name)), "--served-model-name", name, "--threads", "1")
                running.add_worker("encoder", *words, "--prepared-memory", "64MiB")
                running.add_worker(
                    "pd", *words, "--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB", *flags[2:]
                )
            wait_for("all models to be served", lambda: _served(running))
            yield running
        finally:
            running.stop()


def _served(cluster: Cluster) -> bool:
    time.sleep(0.5)  # a look at the registry is dear, and the workers need the cores
    with urllib.request.urlopen(f"{cluster.url}/v1/models", timeout=10) as reply:
        names = {model["id"] for model in json.loads(reply.read())["data"]}
    pools = [worker.pool for worker in cluster.workers()]
    return names == set(NAMES) and pools.count("encoder") == pools.count("pd") == len(NAMES)


def case_of(count: int) -> Case:
    return Case((*range(count), TEXT), tuple(pictures(count)))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", NAMES)
async def test_a_chat_with_pictures_is_answered_as_by_transformers(
    cluster: Cluster, name: str, count: int
) -> None:
    prompt, expected = reference(name, pictures(count), TOKENS)
    answer = await ask(cluster.url, case_of(count), TOKENS, model=name)
    assert answer.prompt_token_ids == prompt
    assert_exact(expected, answer.token_ids, name)


async def test_streams_go_on_exactly_when_their_worker_is_killed(cluster: Cluster) -> None:
    _, expected = reference(NAMES[0], pictures(1), LONG)
    answers = [Answer() for _ in range(3)]
    streams = [
        asyncio.create_task(ask(cluster.url, case_of(1), LONG, NAMES[0], into=answer)) for answer in answers
    ]

    async def begun() -> None:
        while not all(answer.token_ids for answer in answers):
            await asyncio.sleep(0.005)

    await within("streams to begin", begun())
    assert not any(answer.finish_reason for answer in answers), "they end before the kill"
    cluster.kill("pd-0")
    await asyncio.gather(*streams)
    for answer in answers:
        assert_exact(expected, answer.token_ids, "after the kill")
