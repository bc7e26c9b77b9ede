"""The event loop turns while messages of clients are parsed, whatever is in them and whatever their size.

The longest gap between two turns of a ticker on the loop is held against that of a loop that only waits, both
the best of several rounds: what else this machine does is in both of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest

from support.hostile.bare_door import CALLS, BareDoor
from support.hostile.large_messages import BODIES, MESSAGES
from triptych.proxy.openai.app import ENDPOINTS

ROUNDS = 5
TICK = 0.005
#: Seconds that a message may add to the control's longest gap. A body of 2 MiB costs 3 ms of copying; one
#: that is parsed on the loop, or in a thread alone, hundreds.
GAP = 0.1
SIZE = 2 << 20
#: The same for the largest message that is taken, which is decoded in one go: memory, not work.
LARGEST_GAP = 0.4
LARGEST = 64 << 20


@pytest.fixture
async def door() -> AsyncIterator[BareDoor]:
    made = BareDoor()
    yield made
    await made.parsers.close()


async def longest_gap(work: Awaitable[object]) -> float:
    """Between two turns of a ticker until the work has ended."""
    gap, last = 0.0, time.perf_counter()

    async def tick() -> None:
        nonlocal gap, last
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            gap, last = max(gap, now - last), now

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await work
    await asyncio.sleep(0)
    gap = max(gap, time.perf_counter() - last)
    ticker.cancel()
    return gap


async def added_gap(ask: Callable[[], Awaitable[object]], most: float) -> float:
    """What asking adds to the gap of a loop that waits as long: the best of as many rounds as it needs.

    Where the gap alone is short enough nobody else has to be told apart. The first round may be long for
    other reasons: a process starts, modules are imported.
    """
    best = float("inf")
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        gap = await longest_gap(ask())
        if gap < most / 2:
            return gap
        control = await longest_gap(asyncio.sleep(time.perf_counter() - began))
        best = min(best, gap - control)
        if best < most / 2:
            break
    return best


def test_every_endpoint_and_every_call_has_its_largest_messages() -> None:
    assert set(BODIES) == set(ENDPOINTS)
    assert set(MESSAGES) == CALLS


async def check(door: BareDoor, size: int, most: float) -> None:
    """Every message of the tables; all that hold the loop up are told at once."""
    slow = {}
    seen = set()
    for table, ask in ((BODIES, door.post), (MESSAGES, door.call)):
        for target, rows in table.items():
            if (what := ENDPOINTS.get(target, target)) in seen:
                continue  # another name of the same endpoint
            seen.add(what)
            for name, make in rows.items():
                gap = await added_gap(partial(ask, target, make(size)), most)
                if gap > most:
                    slow[f"{target}: {name}"] = round(gap, 3)
    assert not slow


@pytest.mark.timeout(600)
async def test_large_messages_do_not_hold_up_the_event_loop(door: BareDoor) -> None:
    await check(door, SIZE, GAP)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_largest_messages_hold_the_event_loop_up_for_a_copy_of_them(door: BareDoor) -> None:
    await check(door, LARGEST - (1 << 10), LARGEST_GAP)
