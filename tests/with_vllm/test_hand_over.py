"""Prefill in one vLLM, decode in another, KV by NIXL: exact, and exact too where nothing comes.

The two servers are on hosts of their own, network namespaces. A machine without these fails these tests.
"""

from __future__ import annotations

import asyncio
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.chaos.streams import Streams
from support.data.traffic import ask_all, expected, mixed_cases
from support.netns.network import Network
from support.stores.server import StoreServer
from support.vllm_engine.engines import WORDS
from support.vllm_engine.front_door import FrontDoor, assert_varied_and_exact, holds, namespace_of
from support.vllm_engine.server import VllmServer
from triptych.pd_worker.vllm.kv_transfer import LEASE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS, LONG = 40, 120
#: As on a GPU: a CPU's blocks of 128 tokens would be longer than most prompts here.
BLOCKS = ("--block-size", "32")
ROLES = ("prefill", "decode")
#: Seconds in which the CPU time of servers is measured.
REST = 2.0
COUNTER = "vllm:prompt_tokens_by_source_total"


@pytest.fixture(scope="module")
def seed() -> int:
    drawn = random.SystemRandom().randrange(1 << 20)
    print(f"requests are of seed {drawn}")
    return drawn


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(ROLES) as network:
        yield network


@pytest.fixture(scope="module", params=["NixlConnector", "NixlPushConnector"])
def door(
    request, checkpoint: Path, network: Network, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FrontDoor]:
    """A prefill worker before the first server, a decode worker before the second one: it pulls, or is pushed
    to.
    """
    folder = tmp_path_factory.mktemp("apart")
    store = StoreServer(folder / "store", host=network.address, protected_mode="no")
    store.start()
    extra = {"store": store.url, "namespace": namespace_of(checkpoint), "wait_seconds": 2}
    servers = [
        VllmServer(
            *(checkpoint, folder / f"{role}.log", "ec_consumer", extra, (*WORDS, *BLOCKS)),
            nixl=role,
            connector=request.param,
            at=(network, role),
        )
        for role in ROLES
    ]
    words = [("--role", role, "--kv-connector", "nixl") for role in ROLES]
    door = FrontDoor(
        checkpoint, store, servers, folder, pd_words=words, proxy_words=("--prefill-threshold", "0")
    )
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait()
        door.start()
        yield door
    finally:
        door.stop()
        for server in servers:
            server.stop()
        store.kill()


def read(door: FrontDoor) -> float:
    """Prompt tokens that the decode worker's vLLM has got from another one, by its own counter."""
    with urllib.request.urlopen(f"{door.servers[1].url}/metrics", timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    samples = [sample for family in families for sample in family.samples]
    assert any(sample.name == COUNTER for sample in samples), "vLLM has this counter"
    return sum(
        sample.value
        for sample in samples
        if sample.name == COUNTER and sample.labels["source"] == "external_kv_transfer"
    )


def logs(door: FrontDoor) -> list[str]:
    """Lines of both servers."""
    return [line for server in door.servers for line in server.log.read_text().splitlines()]


async def test_36_requests_at_once_are_handed_over_and_equal_generate(door, checkpoint, seed):
    cases = mixed_cases(36, seed=seed, sizes=((256, 256), (160, 256)))
    reference = await asyncio.to_thread(expected, checkpoint, cases, TOKENS)
    before = read(door)
    answers = await ask_all(door.urls[0], cases, TOKENS)
    assert_varied_and_exact(reference, [answer.token_ids for answer in answers])
    prompts = sum(len(answer.prompt_token_ids) for answer in answers)
    with_logprobs = await ask_all(door.urls[0], cases[:4], TOKENS, logprobs=True, top_logprobs=2)
    assert [answer.token_ids for answer in with_logprobs] == [answer.token_ids for answer in answers[:4]]
    assert read(door) - before > prompts / 4, "the receiver's own counter"
    assert door.total("proxy", "triptych_resumes_total") == 0
    assert not any("deprecated" in line and "kv_role" in line for line in logs(door))


async def test_servers_without_work_leave_their_cores_to_others(door):
    """NIXL's progress threads wait for events; vLLM looks after what it keeps for others a while longer."""

    async def at_rest() -> bool:
        before = [server.cpu_seconds() for server in door.servers]
        await asyncio.sleep(REST)
        used = [server.cpu_seconds() - was for server, was in zip(door.servers, before, strict=True)]
        return max(used) < REST / 4

    async with asyncio.timeout(LEASE_SECONDS + 60):
        while not await at_rest():
            pass


async def test_a_prefill_server_that_dies_loses_nothing_and_hands_over_again_when_it_is_back(
    door, checkpoint, seed
):
    prefill = door.servers[0]
    cases = mixed_cases(12, seed=seed + 1)
    reference = await asyncio.to_thread(expected, checkpoint, cases, LONG)
    async with Streams(door.urls[0], cases, LONG, ("killed",)) as streams:
        await holds("streams in the middle", lambda: streams.in_the_middle >= 3)
        prefill.kill()
        answers = await streams.all()
    assert_varied_and_exact(reference, [answer.token_ids for answer in answers])
    alone = await ask_all(door.urls[0], cases[:4], LONG, cache_salt="alone")
    assert_varied_and_exact(reference[:4], [answer.token_ids for answer in alone])
    # In this thread: a thread of the event loop's ends with the test, and with it what it has started.
    prefill.launch()
    await asyncio.to_thread(prefill.wait)
    await hand_over_again(door, checkpoint, seed + 2)


async def test_servers_that_are_cut_apart_lose_nothing_and_hand_over_again_when_they_are_not(
    door, network, checkpoint, seed
):
    cases = mixed_cases(12, seed=seed + 3)
    reference = await asyncio.to_thread(expected, checkpoint, cases, LONG)
    with network.healed():
        async with Streams(door.urls[0], cases, LONG, ("cut",)) as streams:
            await holds("streams in the middle", lambda: streams.in_the_middle >= 3)
            network.cut(*ROLES)
            answers = await streams.all()
        assert_varied_and_exact(reference, [answer.token_ids for answer in answers])
        before = read(door)
        meanwhile = await ask_all(door.urls[0], cases, LONG, cache_salt="while it is cut")
        assert_varied_and_exact(reference, [answer.token_ids for answer in meanwhile])
        assert read(door) == before
    door.assert_alive()
    await hand_over_again(door, checkpoint, seed + 4)


async def hand_over_again(door: FrontDoor, checkpoint: Path, seed: int) -> None:
    """Returns once a prompt's KV has come to the decode server; all answers until then are exact."""
    before, cases = read(door), mixed_cases(8, seed=seed)
    reference = await asyncio.to_thread(expected, checkpoint, cases, TOKENS)

    async def handed_over() -> bool:
        answers = await ask_all(door.urls[0], cases, TOKENS)
        assert_varied_and_exact(reference, [answer.token_ids for answer in answers])
        return read(door) > before

    async with asyncio.timeout(120):
        while not await handed_over():
            await asyncio.sleep(1)
