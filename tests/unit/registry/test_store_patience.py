"""How long the store's answers are waited for where work goes on without them."""

from __future__ import annotations

import asyncio

import pytest

from triptych.registry.store_reach import StorePatience


async def silent(patience: StorePatience, *, hurry: bool) -> float:
    """Seconds until a call without an answer is given up."""
    now = asyncio.get_running_loop().time
    began = now()
    with pytest.raises(TimeoutError):
        async with patience.asked(0.4, hurry=hurry):
            await asyncio.sleep(20)
    return now() - began


async def test_after_a_call_without_an_answer_the_next_ones_do_not_wait() -> None:
    patience, asked = StorePatience(), []
    await silent(patience, hurry=True)
    with pytest.raises(TimeoutError):
        async with patience.asked(60, hurry=True):
            asked.append(1)
    assert asked == []
    async with patience.asked(60, hurry=False):
        asked.append(1)
    assert asked == [1]


async def test_who_needs_the_answer_waits_for_all_of_its_time() -> None:
    patience = StorePatience()
    assert await silent(patience, hurry=False) >= 0.4


async def test_a_store_that_is_slow_is_waited_for_longer() -> None:
    patience = StorePatience()
    async with patience.asked(60, hurry=False):
        await asyncio.sleep(0.1)
    assert await silent(patience, hurry=True) >= 0.39
