"""The context of the call that the running code serves."""

from __future__ import annotations

import asyncio

import pytest

from triptych.proxy.quotas.call_context import NOBODY, Arrival
from triptych.proxy.quotas.current_call import current_call, in_call


def test_a_block_changes_the_call_and_leaves_it_as_it_was() -> None:
    arrival = Arrival("/v1/chat/completions")
    with in_call(arrival=arrival), pytest.raises(ZeroDivisionError), in_call(holder="alice"):
        assert (current_call().holder, current_call().arrival) == ("alice", arrival)
        raise ZeroDivisionError
    assert current_call() is NOBODY


async def test_what_is_started_in_it_serves_the_call_to_its_end_and_others_do_not() -> None:
    go = asyncio.Event()

    async def holder() -> str:
        await go.wait()
        return await asyncio.to_thread(lambda: current_call().holder)

    tasks = []
    for name in ("alice", "bob"):
        with in_call(holder=name):
            tasks.append(asyncio.create_task(holder()))
    tasks.append(asyncio.create_task(holder()))
    go.set()
    assert await asyncio.gather(*tasks) == ["alice", "bob", ""]
