"""Speculative decoding by vLLM: several tokens a frame, and the answers of `generate`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.data.traffic import ask_all, expected, mixed_cases
from support.stores.server import StoreServer
from support.vllm_engine.engines import WORDS
from support.vllm_engine.front_door import FrontDoor, assert_varied_and_exact, namespace_of
from support.vllm_engine.server import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS, CASES = 32, 24
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass
class Drafting:
    door: FrontDoor
    server: VllmServer


@pytest.fixture(scope="module")
def drafting(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    folder = tmp_path_factory.mktemp("drafting")
    store = StoreServer(folder / "store")
    store.start()
    extra = {"store": store.url, "namespace": namespace_of(checkpoint), "wait_seconds": 2}
    words = (*WORDS, "--speculative-config", json.dumps(DRAFTS))
    server = VllmServer(checkpoint, folder / "vllm.log", "ec_consumer", extra, words)
    door = FrontDoor(checkpoint, store, [server], folder)
    try:
        server.start()
        door.start()
        yield Drafting(door, server)
    finally:
        door.stop()
        server.stop()
        store.kill()


async def test_mixed_requests_are_answered_as_by_generate(drafting, checkpoint) -> None:
    cases = mixed_cases(CASES, seed=11)
    reference = await asyncio.to_thread(expected, checkpoint, cases, TOKENS)
    answers = await ask_all(drafting.door.urls[0], cases, TOKENS)
    assert_varied_and_exact(reference, [answer.token_ids for answer in answers])
    assert drafting.server.metrics()["vllm:spec_decode_num_accepted_tokens_total"] > CASES
    assert "tokens, speculatively" in drafting.door.log("pd-0").read_text()
    drafting.door.assert_alive()
