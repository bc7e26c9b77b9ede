"""KV blocks of one vLLM in another one, through our tier of vLLM's OffloadingConnector.

A CPU has no transfers to host memory: `cpu_offloading` copies in their place; the rest is vLLM's own.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.processes.cluster import wait_for
from support.stores.server import StoreServer
from support.vllm_engine.engines import WORDS
from support.vllm_engine.front_door import namespace_of
from support.vllm_engine.server import ROOT, VllmServer, vllm_environment

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

BLOCK, TOKENS = 32, 24
COUNTER = "vllm:prompt_tokens_by_source_total"
SPEC = {"spec_name": "CpuTieringSpec", "spec_module_path": "cpu_offloading", "cpu_bytes_to_use": 256 << 20}
TEXT = "Of all that lies between the hills and the sea, number {}, say what comes first and what comes last. "


def transferred(server: VllmServer) -> float:
    """Prompt tokens that the server itself counts as come from elsewhere."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    counted = {
        sample.labels["source"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == COUNTER
    }
    return float(counted["external_kv_transfer"])


def ask(server: VllmServer, number: int, salt: str) -> tuple[list[int], int]:
    """The answer's tokens, and how many the prompt has."""
    answer: dict[str, Any] = server.ask(
        [{"type": "text", "text": TEXT.format(number) * 6}], TOKENS, cache_salt=salt
    )
    assert answer["status"] == 200, answer
    return answer["token_ids"], answer["usage"]["prompt_tokens"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    store = StoreServer(tmp_path_factory.mktemp("tier") / "store")
    store.start()
    yield store
    store.kill()


@pytest.fixture(scope="module")
def pair(
    checkpoint: Path, store: StoreServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[VllmServer]]:
    folder = tmp_path_factory.mktemp("pair")
    tier = {"type": "TriptychKVTier", "module_path": "triptych.integrations.vllm"}
    tier |= {"store": store.url, "model_key": "tiny@1"}
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    extra = {"kv_connector_extra_config": SPEC | {"secondary_tiers": [tier]}}
    words = (*WORDS, "--block-size", str(BLOCK), "--kv-transfer-config", json.dumps(connector | extra))
    options = {"store": store.url, "namespace": namespace_of(checkpoint)}
    servers = [
        VllmServer(checkpoint, folder / f"{number}.log", "ec_consumer", options, words) for number in range(2)
    ]
    path = f"{vllm_environment()['PYTHONPATH']}{os.pathsep}{ROOT / 'tests' / 'support' / 'vllm_engine'}"
    try:
        for server in servers:
            server._variables["PYTHONPATH"] = path
            server.launch()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.stop()


def test_a_prompt_that_one_vllm_has_computed_another_one_loads_for_the_same_salt_only(
    pair: list[VllmServer], store: StoreServer
) -> None:
    first, second = pair
    expected, tokens = ask(first, 1, "alice")
    blocks = tokens // BLOCK
    assert blocks >= 3
    wait_for("the blocks in the store", lambda: len(store.call("KEYS", "kv:*")) >= blocks, 60)
    assert transferred(second) == 0
    assert ask(second, 1, "bob") == (expected, tokens)
    assert transferred(second) == 0, "another salt has found them"
    assert ask(second, 1, "alice") == (expected, tokens)
    # Its last token is computed all the same.
    assert transferred(second) >= (tokens - 1) // BLOCK * BLOCK, "right answers prove nothing"


def test_without_the_store_prompts_are_computed(pair: list[VllmServer], store: StoreServer) -> None:
    first, second = pair
    store.kill()
    assert ask(first, 2, "alice") == ask(second, 2, "alice")
    assert first.is_alive() and second.is_alive()
