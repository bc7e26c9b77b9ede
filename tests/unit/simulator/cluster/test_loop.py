"""asyncio in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from triptych.simulator.cluster.loop import VirtualLoop


def test_sleeps_and_timeouts_of_tasks_take_no_time_but_virtual_one() -> None:
    loop, seen = VirtualLoop(), list[tuple[str, float]]()

    async def work(name: str, seconds: float) -> None:
        try:
            async with asyncio.timeout(3600.0):
                await asyncio.sleep(seconds)
                seen.append((name, asyncio.get_running_loop().time()))
        except TimeoutError:
            seen.append((f"{name} late", asyncio.get_running_loop().time()))

    tasks = [loop.create_task(work("quick", 60.0)), loop.create_task(work("slow", 7200.0))]
    loop.run()
    assert all(task.done() for task in tasks)
    assert seen == [("quick", 60.0), ("slow late", 3600.0)]


def test_an_unhandled_error_ends_the_run() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    loop = VirtualLoop()
    loop.create_task(fail())
    with pytest.raises(ValueError, match="broken"):
        loop.run()
