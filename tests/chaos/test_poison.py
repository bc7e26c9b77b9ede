"""A request that ends every PD worker which takes it up, among requests that must be answered."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from openai import InternalServerError

from support.data.oracle import assert_exact
from support.data.traffic import Case, ask, client_of, expected, mixed_cases
from support.fakes.poisoned_fleet import Fleet, poisoned_fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

GOOD, TOKENS = 30, 100


@pytest.fixture(scope="module")
def good() -> list[Case]:
    return [case for case in mixed_cases(4 * GOOD, seed=15) if not case.images]


@pytest.fixture(scope="module")
def answers(checkpoint, good) -> list[Any]:
    return expected(checkpoint, good, TOKENS)


async def refused(url: str, text: str) -> str:
    """The error id with which a request of this text ends. Not streamed: its error has a status."""
    async with client_of(url) as client:
        with pytest.raises(InternalServerError) as caught:
            await client.chat.completions.create(
                model="",
                messages=[{"role": "user", "content": text}],
                max_tokens=TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
    assert caught.value.status_code == 500
    found = re.search(r"error id ([0-9a-f]{12})", caught.value.message)
    assert found, caught.value.message
    return found[1]


async def _poison_among(fleet: Fleet, good: list[Case], answers: list[Any], *poisons: str) -> list[str]:
    """Asks all at once, the poisons in the middle; the error ids."""
    urls = fleet.urls
    half = len(good) // 2
    first = [asyncio.create_task(ask(urls[i % len(urls)], good[i], TOKENS)) for i in range(half)]
    bad = [asyncio.create_task(refused(urls[0], f"{poison} please")) for poison in poisons]
    second = [asyncio.create_task(ask(urls[i % len(urls)], good[i], TOKENS)) for i in range(half, len(good))]
    ids = list(await asyncio.gather(*bad))
    got = await asyncio.gather(*first, *second)
    assert_exact(answers, [answer.token_ids for answer in got], min_distinct=15)
    assert {answer.finish_reason for answer in got} == {"length"}
    return ids


@pytest.mark.parametrize("workers", [1, 3])
async def test_one_poison_among_thirty_requests_ends_with_an_error_id_and_all_others_are_answered(
    checkpoint, store_url, good, answers, workers
) -> None:
    async with poisoned_fleet(checkpoint, store_url, workers=workers) as fleet:
        await _poison_among(fleet, good, answers, "poison-prefill")
        assert fleet.ends == 3


async def test_a_poison_of_one_proxy_harms_no_request_of_another(checkpoint, store_url, good, answers):
    async with poisoned_fleet(checkpoint, store_url, workers=2, proxies=2) as fleet:
        await _poison_among(fleet, good, answers, "poison-prefill")
