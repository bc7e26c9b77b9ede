"""A PD worker with vLLM's AsyncLLM in its own process: proxy, encoder worker and store are ours."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.data.oracle import assert_exact
from support.data.traffic import Answer, Case, ask, ask_all, expected, mixed_cases, picture
from support.processes.cluster import wait_for
from support.processes.proxy_process import started_proxy, started_service
from support.stores.server import StoreServer
from support.vllm_engine.in_process import InProcessWorker
from support.waiting import until
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.watchdog import ENGINE_EXIT

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 24
#: Output tokens of requests that are at work while their engine is killed.
LONG = 600
MODEL = ("--dtype", "float32")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreServer]:
    server = StoreServer(tmp_path_factory.mktemp("in_process") / "store")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def worker(
    checkpoint: Path, store: StoreServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InProcessWorker]:
    process = InProcessWorker(checkpoint, store.url, tmp_path_factory.mktemp("worker") / "pd.log")
    process.start()
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()


def four_pictures(seed: int) -> Case:
    images = tuple(picture(seed + index, 64, 64) for index in range(4))
    return Case((0, "import os", 1, 2, f"return {seed}", 3), images)


class Cluster:
    """An encoder worker and a proxy beside the worker, until the block ends."""

    def __init__(self, checkpoint: Path, store: StoreServer, folder: Path) -> None:
        self._checkpoint, self._store, self._folder = checkpoint, store, folder

    async def __aenter__(self) -> str:
        words = ("encoder", str(self._checkpoint), *MODEL, "--threads", "1")
        self._encoder = started_service(self._store.url, self._folder / "encoder.log", *words)
        await self._encoder.__aenter__()
        self._proxy = started_proxy(self._store.url, self._folder / "proxy.log")
        _, port, _ = await self._proxy.__aenter__()
        await registered(self._store, 2)
        return f"http://127.0.0.1:{port}"

    async def __aexit__(self, *error: object) -> None:
        await self._proxy.__aexit__(None, None, None)
        await self._encoder.__aexit__(None, None, None)


async def registered(store: StoreServer, count: int) -> None:
    client = await EmbeddingStore.connect(store.url)
    try:
        async with asyncio.timeout(120):
            while len(list(await Registry(client).workers())) < count:
                await asyncio.sleep(0.2)
    finally:
        await client.close()


async def test_text_and_one_to_four_pictures_are_answered_as_generate_does(
    checkpoint, store, worker, tmp_path
):
    cases = [*mixed_cases(20, seed=5), *(four_pictures(50 + index) for index in range(4))]
    reference = await asyncio.to_thread(expected, checkpoint, cases, TOKENS)
    async with asyncio.timeout(300), Cluster(checkpoint, store, tmp_path) as url:
        answers = await ask_all(url, cases, TOKENS)
    outputs = [answer.token_ids for answer in answers]
    assert_exact(reference, outputs, min_distinct=1)
    assert len({tuple(output) for output in outputs}) > len(outputs) // 2


async def test_what_clients_ask_of_sampling_holds(checkpoint, store, worker, tmp_path):
    text, image = Case(("name the list",)), Case((0, "name it"), (picture(900, 64, 64),))
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": schema | {"additionalProperties": False}},
    }
    async with asyncio.timeout(300), Cluster(checkpoint, store, tmp_path) as url:
        bent = await ask(url, text, 4, logit_bias={"5": 100})
        shaped = await ask(url, image, 60, response_format=wanted, ignore_eos=False)
        drawn = [await ask(url, image, 8, temperature=0.9, seed=seed) for seed in (1, 1, 2)]
    assert bent.token_ids == [5] * 4
    assert shaped.text in ('{"a":true}', '{"a":false}', '{"a": true}', '{"a": false}')
    assert drawn[0].token_ids == drawn[1].token_ids != drawn[2].token_ids


async def test_requests_of_an_engine_that_is_killed_are_answered_once_the_worker_is_back(
    checkpoint, store, worker, tmp_path
):
    cases = [case for case in mixed_cases(8, seed=6) if len(case.images) != 2]
    reference = await asyncio.to_thread(expected, checkpoint, cases, LONG)
    async with asyncio.timeout(500), Cluster(checkpoint, store, tmp_path) as url:
        answers = [Answer() for _ in cases]
        asking = [
            asyncio.create_task(ask(url, case, LONG, into=answer))
            for case, answer in zip(cases, answers, strict=True)
        ]
        await until(lambda: all(len(answer.token_ids) > 5 for answer in answers), "tokens of all", 120)
        assert not any(task.done() for task in asking)
        engine, *_ = worker.engine_processes()
        os.kill(engine, signal.SIGKILL)
        assert await asyncio.to_thread(worker.wait_ended) == ENGINE_EXIT
        worker.start()
        await asyncio.to_thread(worker.wait_ready)
        await asyncio.gather(*asking)
    assert "the vLLM engine is lost" in worker.log.read_text()
    assert_exact(reference, [answer.token_ids for answer in answers], min_distinct=1)


async def test_sigterm_lets_a_request_finish_and_leaves_no_process(checkpoint, store, worker, tmp_path):
    (case,) = mixed_cases(1, seed=7)
    async with asyncio.timeout(300), Cluster(checkpoint, store, tmp_path) as url:
        answer = Answer()
        asking = asyncio.create_task(ask(url, case, LONG, into=answer))
        await until(lambda: len(answer.token_ids) > 5, "tokens", 60)
        engine = worker.engine_processes()
        worker.send(signal.SIGTERM)
        await asking
        assert await asyncio.to_thread(worker.wait_ended) == 0
    assert len(answer.token_ids) == LONG
    assert engine and not any(map(is_alive, engine))


def test_the_engine_of_a_worker_that_was_killed_ends(checkpoint, store, worker):
    if worker.ended is not None:
        worker.start()
        worker.wait_ready()
    engine = worker.engine_processes()
    worker.send(signal.SIGKILL)
    worker.wait_ended()
    assert engine
    wait_for("the engine to end", lambda: not any(map(is_alive, engine)))


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
