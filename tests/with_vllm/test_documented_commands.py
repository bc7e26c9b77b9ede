"""Every command of docs/vllm.md runs: devices, addresses, paths and a few words are others, by one table."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from support.data.adapters import write_adapter
from support.data.retrieval import NO, YES, as_embedder, as_reranker
from support.data.traffic import ask_all, expected, mixed_cases
from support.processes.cluster import free_port
from support.processes.proxy_process import started_proxy, started_service
from support.stores.server import StoreServer
from support.vllm_engine.checkpoints import vllm_checkpoint
from support.vllm_engine.documented import Documented
from support.vllm_engine.encoders import EncoderProcess
from support.vllm_engine.fleet import TEXT, fresh
from support.vllm_engine.front_door import assert_varied_and_exact, namespace_of
from support.vllm_engine.server import HOME, VllmServer, vllm_environment
from triptych.apps.launch.cluster_state import answers_ready
from triptych.registry.registry import Registry
from triptych.store.embedding_store import EmbeddingStore

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(590)]

_URL = "http://VLLM:8000"
ADAPTERS = ("sql", "chat")
TOKENS = 8
#: Of a vLLM that a worker starts.
SMALL = ("--max-model-len", "2048", "--dtype", "float32")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    server = StoreServer(tmp_path_factory.mktemp("documented") / "store")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def page(checkpoint: Path, store: StoreServer, tmp_path_factory: pytest.TempPathFactory) -> Documented:
    folder, namespace = tmp_path_factory.mktemp("checkpoints"), namespace_of(checkpoint)
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s" * 32)

    for number, name in enumerate(ADAPTERS):
        write_adapter(checkpoint, folder / name, number)

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def made(make: Callable[[Path], Path], name: str) -> str:
        return str(make(vllm_checkpoint("qwen3_vl", folder / name)))

    return Documented({
        "MODEL": str(checkpoint),
        "/models/qwen3-vl": str(checkpoint),
        "/adapters": str(folder),
        "Qwen3-VL-Embedding-2B": made(as_embedder, "embedder"),
        "Qwen3-VL-Reranker-2B": made(as_reranker, "reranker"),
        "bfloat16": "float32",
        "redis://STORE:6379/0": store.url,
        "redis://triptych-store-0:6379/0": store.url,
        '"namespace": "..."': f'"namespace": "{namespace}"',
        "64 hex characters": namespace,
        "FILE": str(secret),
        # What published rerankers have, and this one does not.
        '["no", "yes"]': json.dumps([tokenizer.id_to_token(token) for token in (NO, YES)]),
        '"tie_word_embeddings": true': '"tie_word_embeddings": false',
    })  # fmt: skip


def commands(page: Documented, program: str, verb: str) -> list[list[str]]:
    return [words for words in page.commands() if words[:2] == [program, verb]]


@contextlib.contextmanager
def served(words: list[str], log: Path) -> Iterator[VllmServer]:
    """A server of these words, those behind `vllm serve`, small enough for a test."""
    server = VllmServer.of_words(words, log)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def cluster(
    page: Documented, store: StoreServer, server: VllmServer, folder: Path
) -> AsyncIterator[str]:
    """The documented PD worker, an encoder worker and a proxy; the proxy's address."""
    words, _ = commands(page, "triptych", "pd")
    pd = [word.replace(_URL, server.url) for word in words]
    at = pd.index("--store")
    assert pd[at + 1] == store.url
    encoder = ("encoder", pd[2], "--dtype", "float32", "--threads", "1")
    async with contextlib.AsyncExitStack() as stack:
        for name, words in (("encoder", encoder), ("pd", [*pd[1:at], *pd[at + 2 :]])):
            await stack.enter_async_context(started_service(store.url, folder / f"{name}.log", *words))
        _, port, _ = await stack.enter_async_context(started_proxy(store.url, folder / "proxy.log"))
        client = await EmbeddingStore.connect(store.url)
        stack.push_async_callback(client.close)
        while len(await Registry(client).workers()) < 2:
            await asyncio.sleep(0.2)
        yield f"http://127.0.0.1:{port}"


async def test_the_server_elsewhere_and_the_worker_before_it_answer_as_generate(
    page, store, checkpoint, tmp_path
):
    words = commands(page, "vllm", "serve")[0]
    cases = mixed_cases(6, seed=11)
    reference = await asyncio.to_thread(expected, checkpoint, cases, TOKENS)
    with served(words[2:], tmp_path / "vllm.log") as server:
        async with asyncio.timeout(300), cluster(page, store, server, tmp_path) as url:
            answers = await ask_all(url, cases, TOKENS)
    assert_varied_and_exact(reference, [answer.token_ids for answer in answers])


@pytest.mark.parametrize("number", [1, 2])
def test_a_server_of_embeddings_or_scores_starts(page, number, tmp_path):
    words = commands(page, "vllm", "serve")[number]
    with served(words[2:], tmp_path / "vllm.log") as server:
        assert server.is_alive()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is beside the worker, as far as a process can tell that a test starts."""
    for name, value in vllm_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{HOME / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}")


async def test_a_worker_with_adapters_starts_its_own_vllm(page, store, installed, tmp_path):
    _, words = commands(page, "triptych", "pd")
    log = tmp_path / "pd.log"
    async with asyncio.timeout(400), started_service(store.url, log, *words[1:], *SMALL) as process:
        while "ready: " not in log.read_text():
            assert process.poll() is None, log.read_text()[-4000:]
            await asyncio.sleep(0.2)
        client = await EmbeddingStore.connect(store.url)
        try:
            (worker,) = await Registry(client).workers()
        finally:
            await client.close()
    assert worker.adapters.keys() == set(ADAPTERS)


async def test_a_cluster_with_prefill_and_decode_apart_answers_as_generate(
    page, checkpoint, installed, tmp_path
):
    (words,) = commands(page, "triptych", "serve")
    port, cases, log = free_port(), mixed_cases(4, seed=12), tmp_path / "serve.log"
    reference = await asyncio.to_thread(expected, checkpoint, cases, TOKENS)
    command = [sys.executable, "-m", "triptych.apps.cli", *words[1:], *SMALL, "--port", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(500):
            while not await answers_ready("127.0.0.1", port):
                assert process.poll() is None, log.read_text()[-4000:]
                await asyncio.sleep(0.2)
            answers = await ask_all(f"http://127.0.0.1:{port}", cases, TOKENS)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)
    assert_varied_and_exact(reference, [answer.token_ids for answer in answers])


def test_the_connector_alone_takes_an_embedding_by_the_documented_request(page, checkpoint, store, tmp_path):
    encoder = EncoderProcess(checkpoint, store.url, tmp_path / "encoder.log")
    encoder.start()
    try:
        words = [str(checkpoint), *page.args(), "--dtype", "float32"]
        picture = fresh(160, 160)
        encoder.encode(picture)
        with served(words, tmp_path / "vllm.log") as server:
            part = {**page.request(), "uuid": encoder.key(picture)}
            assert part["image_embeds"] == {"image_grid_thw": [1, 20, 20]}, "of a picture of 160 pixels here"
            assert server.ask([part, TEXT], TOKENS)["status"] == 200
    finally:
        encoder.stop()


@pytest.mark.parametrize("verb", ["namespace", "store"])
def test_a_command_that_prints_something_does(page, checkpoint, verb):
    (words,) = commands(page, "triptych", verb)
    command = [sys.executable, "-m", "triptych.apps.cli", *words[1:]]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert (namespace_of(checkpoint) if verb == "namespace" else "triptych-vllm") in printed
