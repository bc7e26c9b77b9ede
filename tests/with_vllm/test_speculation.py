"""Speculative decoding by vLLM: several tokens a frame, and the answers of `generate`, with an adapter too.

Of vLLM 0.32's methods its CPU build also serves `draft_model`. It does not run `ngram_gpu` ("pin_memory=True
requires a CUDA or other accelerator backend"), `suffix` without a package of its own ("Arctic Inference is
required for suffix decoding"), and `mtp` of this class ("Unsupported speculative method: 'mtp'").
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.data.adapters import merged, write_adapter
from support.data.traffic import ask_all, expected, mixed_cases
from support.stores.server import StoreServer
from support.vllm_engine.engines import WORDS
from support.vllm_engine.front_door import FrontDoor, assert_varied_and_exact, namespace_of
from support.vllm_engine.server import VllmServer
from triptych.base.config import PDConfig
from triptych.pd_worker.vllm.adapters import lora_flags, read_adapters

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS, CASES = 32, 16
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass
class Drafting:
    """A front door, and the checkpoint that each of its names is to answer as."""

    door: FrontDoor
    server: VllmServer
    references: dict[str, Path]


@pytest.fixture(scope="module")
def drafting(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    folder = tmp_path_factory.mktemp("drafting")
    store = StoreServer(folder / "store")
    store.start()
    extra = {"store": store.url, "namespace": namespace_of(checkpoint), "wait_seconds": 2}
    adapter = write_adapter(checkpoint, folder / "sql", 7)
    modules = f"sql={adapter}"
    config = PDConfig(model=str(checkpoint), dtype="float32", lora_modules=modules)
    words = (*WORDS, "--speculative-config", json.dumps(DRAFTS), *lora_flags(read_adapters(config), "cpu"))
    references = {checkpoint.name: checkpoint, "sql": merged(checkpoint, adapter, folder / "merged")}
    server = VllmServer(checkpoint, folder / "vllm.log", "ec_consumer", extra, words)
    door = FrontDoor(checkpoint, store, [server], folder, pd_words=[("--lora-modules", modules)])
    try:
        server.start()
        door.start()
        yield Drafting(door, server, references)
    finally:
        door.stop()
        server.stop()
        store.kill()


async def test_mixed_requests_are_answered_as_by_generate(drafting) -> None:
    cases, url = mixed_cases(CASES, seed=11), drafting.door.urls[0]
    answers = await asyncio.gather(*(ask_all(url, cases, TOKENS, name) for name in drafting.references))
    for path, given in zip(drafting.references.values(), answers, strict=True):
        reference = await asyncio.to_thread(expected, path, cases, TOKENS)
        assert_varied_and_exact(reference, [answer.token_ids for answer in given])
    assert drafting.server.metrics()["vllm:spec_decode_num_accepted_tokens_total"] > CASES
    assert "tokens, speculatively" in drafting.door.log("pd-0").read_text()
    drafting.door.assert_alive()
