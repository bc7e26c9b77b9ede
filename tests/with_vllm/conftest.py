"""One store, one encoder worker of ours and one vLLM that it feeds, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.stores.server import StoreServer
from support.vllm_engine.checkpoints import vllm_checkpoint
from support.vllm_engine.encoders import EncoderProcess
from support.vllm_engine.engines import Engines
from support.vllm_engine.fleet import Fleet
from support.vllm_engine.server import HOME, VllmServer

#: Seconds that a request waits for an embedding: long enough for a store that is down for five.
WAIT_SECONDS = 12


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # What our connector needs beside vLLM is in a folder of its own: without it vLLM ends as it starts.
    if not (HOME / "venv" / "bin" / "vllm").exists() or not (HOME / "packages").is_dir():
        raise FileNotFoundError(f"vLLM and our connector's packages are not in {HOME}: use `make test-vllm`")
    return vllm_checkpoint("qwen3_vl", tmp_path_factory.mktemp("checkpoint") / "qwen3_vl")


@pytest.fixture(scope="session")
def fleet(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    store = StoreServer(folder / "store")
    store.start()
    encoder = EncoderProcess(checkpoint, store.url, folder / "encoder.log")
    vllm: VllmServer | None = None
    try:
        encoder.start()
        options = {"store": store.url, "namespace": encoder.namespace, "wait_seconds": WAIT_SECONDS}
        # No prefix cache: every request needs its embeddings.
        words = ("--no-enable-prefix-caching",)
        vllm = VllmServer(checkpoint, folder / "vllm.log", "ec_consumer", options, words)
        vllm.start()
        yield Fleet(checkpoint, store, encoder, vllm)
    finally:
        if vllm is not None:
            vllm.stop()
        encoder.stop()
        store.kill()


@pytest.fixture(scope="session")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Two servers for PD workers, with their prefix caches and a store of their own."""
    engines = Engines.of(checkpoint, tmp_path_factory.mktemp("engines"), 2)
    try:
        engines.start()
        yield engines
    finally:
        engines.stop()


@pytest.fixture(scope="session")
def producer(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A vLLM that encodes and saves, in the encoder workers' namespace."""
    options = {"store": fleet.store.url, "namespace": fleet.encoder.namespace, "ttl_seconds": 600}
    words = ("--no-enable-prefix-caching", "--max-num-batched-tokens", "4096")
    log = tmp_path_factory.mktemp("producer") / "vllm.log"
    server = VllmServer(fleet.checkpoint, log, "ec_producer", options, words)
    try:
        server.start()
        yield server
    finally:
        server.stop()
