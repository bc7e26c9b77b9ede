"""A PD worker whose engine is an unmodified vLLM: proxy, encoder worker and store are ours."""

from __future__ import annotations

import asyncio

import pytest

from support.data.traffic import ask_all, expected, mixed_cases
from support.stores.server import StoreServer
from support.vllm_engine.engines import Engines
from support.vllm_engine.front_door import assert_varied_and_exact, cluster
from support.vllm_engine.server import VllmServer

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 24


@pytest.fixture
def store(engines: Engines) -> StoreServer:
    return engines.store


@pytest.fixture
def vllm(engines: Engines) -> VllmServer:
    return engines.servers[0]


async def test_mixed_requests_through_the_proxy_are_answered_as_generate_does(
    checkpoint, store, vllm, tmp_path
):
    cases = mixed_cases(24, seed=3)
    reference = await asyncio.to_thread(expected, checkpoint, cases, TOKENS)
    async with asyncio.timeout(300), cluster(checkpoint, store, vllm, tmp_path) as url:
        answers = await ask_all(url, cases, TOKENS)
    assert_varied_and_exact(reference, [answer.token_ids for answer in answers])
    assert vllm.is_alive()
