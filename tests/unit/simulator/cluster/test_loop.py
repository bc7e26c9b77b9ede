"""asyncio in virtual time."""

from __future__ import annotations

import asyncio
import os
import signal
import weakref

import pytest

from triptych.simulator.cluster.loop import FifoLock, VirtualLoop
from triptych.simulator.run import _undisturbed


def test_calls_come_in_the_order_of_their_moments_and_equal_ones_in_the_order_of_asking() -> None:
    loop, seen = VirtualLoop(), list[str]()
    for moment, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        loop.call_at(moment, seen.append, name)
    loop.call_at(1.5, seen.append, "never").cancel()
    loop.run()
    assert seen == ["a", "b", "c"] and loop.time() == 2.0


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


def test_ctrl_c_ends_a_simulation_even_where_python_drops_the_interrupt() -> None:
    class Task:
        pass

    task = Task()
    forgets = weakref.ref(task, lambda _: os.kill(os.getpid(), signal.SIGINT))

    @_undisturbed()
    def simulate() -> None:
        nonlocal task
        loop = VirtualLoop()
        del task  # what the callback raises is printed and goes no further
        assert forgets() is None
        loop.run()

    # A shell that starts the tests in the background has SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            simulate()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupted_loop_makes_no_further_call() -> None:
    loop, seen = VirtualLoop(), list[str]()
    loop.call_soon(loop.interrupt)
    loop.call_soon(seen.append, "went on")
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert seen == []


def test_a_run_ends_where_it_is_stopped_and_goes_on_from_there() -> None:
    loop, seen = VirtualLoop(), list[int]()
    for moment in range(4):
        loop.call_at(float(moment), seen.append, moment)
    loop.call_at(1.0, loop.stop)
    loop.run()
    assert seen == [0, 1] and loop.time() == 1.0
    loop.run()
    assert seen == [0, 1, 2, 3]


def test_an_unhandled_error_ends_the_run() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    loop = VirtualLoop()
    loop.create_task(fail())
    with pytest.raises(ValueError, match="broken"):
        loop.run()


def test_a_lock_is_granted_in_order() -> None:
    lock, seen = FifoLock(), list[str]()
    for name in "abc":
        lock.acquire(lambda name=name: seen.append(name))  # type: ignore[misc]
    assert seen == ["a"]
    lock.release()
    lock.release()
    lock.release()
    assert seen == ["a", "b", "c"]
