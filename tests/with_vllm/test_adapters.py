"""LoRA adapters through vLLM: a model and two adapters at once answer as the merged checkpoints do."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.data.adapters import merged, write_adapter
from support.data.traffic import ask, ask_all, client_of, expected, mixed_cases
from support.processes.cluster import wait_for
from support.stores.server import StoreServer
from support.vllm_engine.engines import WORDS
from support.vllm_engine.front_door import FrontDoor, assert_varied_and_exact, namespace_of
from support.vllm_engine.server import VllmServer
from triptych.base.config import PDConfig
from triptych.pd_worker.vllm.adapters import lora_flags, read_adapters

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS, CASES = 16, 12


@dataclass
class Adapted:
    """A front door, and the checkpoint that each of its names is to answer as."""

    door: FrontDoor
    references: dict[str, Path]


def listed(url: str) -> set[str]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as reply:
        return {model["id"] for model in json.load(reply)["data"]}


@pytest.fixture(scope="module")
def adapted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    """Two PD workers: the first has both adapters, the second none."""
    folder = tmp_path_factory.mktemp("adapters")
    folders = {
        name: write_adapter(checkpoint, folder / name, seed) for seed, name in enumerate(("sql", "chat"))
    }
    references = {name: merged(checkpoint, path, folder / f"merged-{name}") for name, path in folders.items()}
    store = StoreServer(folder / "store")
    store.start()
    extra = {"store": store.url, "namespace": namespace_of(checkpoint), "wait_seconds": 2}
    modules = ",".join(f"{name}={path}" for name, path in folders.items())
    config = PDConfig(model=str(checkpoint), dtype="float32", lora_modules=modules)
    more = [lora_flags(read_adapters(config), "cpu"), []]
    servers = [
        VllmServer(checkpoint, folder / f"vllm-{at}.log", "ec_consumer", extra, (*WORDS, *words))
        for at, words in enumerate(more)
    ]
    door = FrontDoor(checkpoint, store, servers, folder, pd_words=[("--lora-modules", modules), ()])
    try:
        for server in servers:
            server.start()
        door.start()
        wait_for("the proxy to know the adapters", lambda: listed(door.urls[0]) >= folders.keys())
        yield Adapted(door, {checkpoint.name: checkpoint, **references})
    finally:
        door.stop()
        for server in servers:
            server.stop()
        store.kill()


async def test_the_model_and_two_adapters_at_once_answer_as_the_merged_checkpoints(adapted) -> None:
    cases, url = mixed_cases(CASES, seed=5), adapted.door.urls[0]
    given = [ask_all(url, cases, TOKENS, name) for name in adapted.references]
    found = [[answer.token_ids for answer in answers] for answers in await asyncio.gather(*given)]
    for path, outputs in zip(adapted.references.values(), found, strict=True):
        assert_varied_and_exact(await asyncio.to_thread(expected, path, cases, TOKENS), outputs)
    # The same prompts once more: what vLLM has cached of each is its own adapter's.
    again = [ask_all(url, cases, TOKENS, name) for name in adapted.references]
    assert [[answer.token_ids for answer in answers] for answers in await asyncio.gather(*again)] == found
    assert all(len({tuple(output) for output in outputs}) == 3 for outputs in zip(*found, strict=True))
    pictures = {picture.tobytes() for case in cases for picture in case.images}
    assert adapted.door.total("encoder", "triptych_encoder_tower_items_total") == len(pictures)
    adapted.door.assert_alive()


async def test_adapters_are_listed_with_their_model_and_counted(adapted) -> None:
    url = adapted.door.urls[0]
    async with client_of(url) as client:
        models = {model.id: model.model_extra for model in (await client.models.list()).data}
    base, *adapters = adapted.references
    assert {name: extra["parent"] for name, extra in models.items()} == {
        base: None,
        **dict.fromkeys(adapters, base),
    }
    counter = "triptych_adapter_requests_total"
    before = adapted.door.total("proxy", counter)
    for name in (base, "sql"):
        await ask(url, mixed_cases(1)[0], TOKENS, name)
    assert adapted.door.total("proxy", counter) == before + 1
