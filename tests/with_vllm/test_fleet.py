"""Two vLLM servers behind PD workers of ours, two encoder workers and two proxies: what fails under load.

Every request is answered as by generate, whatever is killed, evicted or flushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from support.chaos.streams import Streams
from support.data.oracle import OracleResult
from support.data.traffic import Case, ask, expected, mixed_cases, picture
from support.processes.cluster import scrape
from support.vllm_engine.front_door import FrontDoor, assert_varied_and_exact, holds
from support.waiting import until, within
from triptych.store import keys

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 160
CASES = mixed_cases(24, seed=5)
#: About 150 KB of embeddings for each picture.
LARGE = mixed_cases(16, seed=6, sizes=((256, 256), (160, 256)))


@pytest.fixture(scope="module")
def door(checkpoint: Any, engines: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    folder = tmp_path_factory.mktemp("door")
    door = FrontDoor(checkpoint, engines.store, engines.servers, folder, encoders=2, proxies=2)
    try:
        door.start()
        yield door
    finally:
        door.stop()


@pytest.fixture(autouse=True)
def all_processes_live(door: FrontDoor) -> Iterator[None]:
    yield
    door.assert_alive()


@pytest.fixture(scope="module")
def reference(checkpoint: Any) -> list[OracleResult]:
    return expected(checkpoint, CASES, TOKENS)


@asynccontextmanager
async def load(door: FrontDoor, salt: str) -> AsyncIterator[list[Streams]]:
    """All cases, every second one at the second proxy; nothing of them is in the cluster for this salt."""
    async with AsyncExitStack() as stack:
        halves = [
            Streams(url, CASES[number::2], TOKENS, (f"{salt} {number}",))
            for number, url in enumerate(door.urls)
        ]
        yield [await stack.enter_async_context(half) for half in halves]


async def assert_all_exact(halves: list[Streams], reference: list[OracleResult]) -> None:
    for number, half in enumerate(halves):
        answers = await half.all()
        assert_varied_and_exact(reference[number::2], [answer.token_ids for answer in answers])


async def in_the_middle(halves: list[Streams], what: str) -> None:
    """Returns while several requests with pictures are at work in vLLM."""
    await until(lambda: sum(half.in_the_middle for half in halves) >= 6, "streams in the middle", 90)
    halves[0].assert_under_way(what)


def generated(door: FrontDoor) -> list[float]:
    """Tokens that each server has put out since its start."""
    return [server.metrics()["vllm:generation_tokens_total"] for server in door.servers]


def moved(door: FrontDoor) -> int:
    """Items that proxies took from an encoder worker that was lost, by their logs."""
    text = "".join(door.log(f"proxy-{number}").read_text() for number in range(len(door.urls)))
    return sum(int(count) for count in re.findall(r"go on elsewhere than at \S+: (\d+)", text))


def all_wait(url: str, requests: int, items: int) -> bool:
    """Whether the proxy has so many requests, and at least so many of their items wait for an encoder."""
    samples = scrape(f"{url}/metrics")
    return samples["triptych_requests_in_flight"] == requests and samples["triptych_waiting_items"] >= items


async def test_mixed_requests_are_answered_as_generate_does_by_both_servers(door, reference):
    before = generated(door)
    async with load(door, "plain") as halves:
        await assert_all_exact(halves, reference)
    assert all(now > then for now, then in zip(generated(door), before, strict=True))
    assert door.total("proxy", "triptych_resumes_total") == 0


async def test_a_picture_that_both_proxies_ask_for_is_encoded_once(door, checkpoint):
    pictures = [picture(7000 + number, 64, 64) for number in range(6)]
    cases = [
        Case((0, "Describe it", 1), (one, two)) for one, two in zip(pictures, pictures[1:], strict=False)
    ]
    before = door.total("encoder", "triptych_encoder_tower_items_total")
    for name in ("encoder-0", "encoder-1"):
        door.signal(name, signal.SIGSTOP)
    try:
        asked = [asyncio.create_task(ask(url, case, 16)) for case in cases for url in door.urls]
        for url in door.urls:
            await holds("all requests to wait", partial(all_wait, url, len(cases), len(pictures)))
    finally:
        for name in ("encoder-0", "encoder-1"):
            door.signal(name, signal.SIGCONT)
    answers = await within("the answers", asyncio.gather(*asked))
    references = [one for one in expected(checkpoint, cases, 16) for _ in door.urls]
    assert_varied_and_exact(references[::2], [answer.token_ids for answer in answers[::2]])
    assert_varied_and_exact(references[1::2], [answer.token_ids for answer in answers[1::2]])
    assert door.total("encoder", "triptych_encoder_tower_items_total") - before == len(pictures)


async def test_an_encoder_worker_that_is_killed_under_load_costs_no_request(door, reference):
    before = moved(door)
    door.signal("encoder-0", signal.SIGSTOP)
    try:
        async with load(door, "encoder") as halves:
            # Those whose pictures are at the other encoder worker go on; the rest waits for this one, until
            # the proxies find that it does not answer.
            await until(
                lambda: (
                    any(half.in_the_middle for half in halves)
                    and door.total("proxy", "triptych_waiting_items") > 0
                ),
                "a stream in its middle, and items that wait",
                90,
            )
            door.kill("encoder-0")
            await assert_all_exact(halves, reference)
    except BaseException:
        # Later tests need it.
        with contextlib.suppress(ProcessLookupError):
            door.signal("encoder-0", signal.SIGCONT)
        raise
    assert moved(door) > before
    door.replace("encoder-0")


async def test_a_pd_worker_that_is_killed_under_load_is_resumed_at_the_other(door, reference):
    before = door.total("proxy", "triptych_resumes_total")
    async with load(door, "pd") as halves:
        await in_the_middle(halves, "the PD worker's death")
        door.kill("pd-0")
        await assert_all_exact(halves, reference)
    assert door.total("proxy", "triptych_resumes_total") > before
    door.replace("pd-0")


async def test_a_vllm_that_is_killed_under_load_is_resumed_at_the_other_and_serves_again(door, reference):
    before = door.total("proxy", "triptych_resumes_total")
    async with load(door, "vllm") as halves:
        await in_the_middle(halves, "vLLM's death")
        door.servers[0].kill()
        await assert_all_exact(halves, reference)
    assert door.total("proxy", "triptych_resumes_total") > before
    assert door.total("pd", "triptych_pd_engine_up") == 1
    door.servers[0].start()
    await holds("both engines", lambda: door.total("pd", "triptych_pd_engine_up") == 2)
    async with load(door, "vllm again") as halves:
        await assert_all_exact(halves, reference)
    assert all(generated(door))


async def test_a_store_that_is_down_for_five_seconds_under_load_costs_no_request(door, reference):
    async with load(door, "before") as before:
        await in_the_middle(before, "the store's death")
        door.store.kill()
        async with load(door, "meanwhile") as meanwhile:
            await asyncio.sleep(5)
            assert not any(half.ended for half in meanwhile)
            door.store.start()
            for halves in (before, meanwhile):
                await assert_all_exact(halves, reference)
    await holds("all workers to register again", lambda: len(door.workers()) == 4)


async def test_values_that_a_small_store_evicts_are_encoded_again(door, checkpoint):
    """The last one: a proxy that has encoded much again refuses pictures for half a minute."""
    tokens = 24
    references = await asyncio.to_thread(expected, checkpoint, LARGE, tokens)
    store, pictures = door.store, len({image.tobytes() for case in LARGE for image in case.images})
    for key in store.call("KEYS", keys.EMBEDDING + "*"):
        # Of earlier tests: they would be evicted first.
        store.call("DEL", key)
    encoded = door.total("encoder", "triptych_encoder_tower_items_total")
    evicted = store.call("INFO", "stats")["evicted_keys"]
    size = store.call("INFO", "memory")["used_memory"] + 1_500_000
    store.call("CONFIG", "SET", "maxmemory", size)
    try:
        # Their shares of it: before, they would have more encoded at once than it holds.
        await holds(
            "the proxies to see it", lambda: door.total("proxy", "triptych_store_max_bytes") == 2 * size
        )
        # What the first round has saved, the second one finds in part.
        for _ in range(2):
            async with Streams(door.urls[0], LARGE, tokens, ("evicted",)) as streams:
                answers = await streams.all()
            assert_varied_and_exact(references, [answer.token_ids for answer in answers])
        assert store.call("INFO", "stats")["evicted_keys"] > evicted
        assert door.total("encoder", "triptych_encoder_tower_items_total") - encoded > pictures
    finally:
        store.call("CONFIG", "SET", "maxmemory", "64mb")
