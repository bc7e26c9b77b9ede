"""Threads that prepare input: small work never waits for large work, whose turns are its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from triptych.base.errors import Unavailable
from triptych.pd_worker.turn_pool import TurnPool


class ByHand(Executor):
    """Begins whatever comes; it ends when the test says so."""

    def __init__(self) -> None:
        self.begun: dict[str, Future[Any]] = {}
        self.order: list[str] = []

    def submit(self, work: Callable[..., Any], /, *_: Any, **__: Any) -> Future[Any]:
        future: Future[Any] = Future()
        name = work()
        self.order.append(name)
        self.begun[name] = future
        return future

    async def end(self, name: str) -> None:
        self.begun[name].set_result(name)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


class Threads:
    def __init__(self, places: int) -> None:
        self.executor = ByHand()
        self.pool = TurnPool(self.executor, places, clock=lambda: 0.0)
        self.tasks: list[asyncio.Task[str]] = []

    async def ask(self, *names: str, tenant: str = "a", large: bool = False) -> None:
        for name in names:
            work = self.pool.run(tenant, lambda name=name: name, large=large)
            self.tasks.append(asyncio.create_task(work))
        await asyncio.sleep(0)


async def test_small_work_has_a_place_at_once_however_much_large_work_another_tenant_has():
    threads = Threads(2)
    await threads.ask("l1", "l2", "l3", large=True)
    assert threads.executor.order == ["l1"]
    await threads.ask("s1", tenant="b")
    assert threads.executor.order == ["l1", "s1"]


async def test_large_work_gets_its_place_in_the_middle_of_small_work_without_end():
    threads = Threads(2)
    await threads.ask("s1", "s2", "s3", "s4")
    await threads.ask("l1", "l2", tenant="b", large=True)
    await threads.executor.end("s1")
    await threads.executor.end("s2")
    assert threads.executor.order == ["s1", "s2", "l1", "s3"]
    await threads.executor.end("l1")
    assert threads.executor.order[-1] == "l2"


async def test_a_pool_of_one_place_serves_large_work_too():
    threads = Threads(1)
    await threads.ask("l1", large=True)
    await threads.ask("s1")
    assert threads.executor.order == ["l1"]
    await threads.executor.end("l1")
    assert threads.executor.order == ["l1", "s1"]
    await threads.executor.end("s1")
    assert [await task for task in threads.tasks] == ["l1", "s1"]


@pytest.mark.parametrize("large", [False, True])
async def test_the_tenant_with_less_of_its_kind_is_next(large):
    threads = Threads(1)
    await threads.ask("a1", "a2", "a3", large=large)
    await threads.ask("b1", tenant="b", large=large)
    now = iter((1.0, 1.0, 2.0, 2.0, 3.0, 3.0))
    threads.pool._clock = lambda: next(now)
    await threads.executor.end("a1")
    assert threads.executor.order[-1] == "b1"


async def test_work_that_is_not_wanted_any_more_takes_no_place():
    threads = Threads(2)
    await threads.ask("l1", large=True)
    late = asyncio.create_task(threads.pool.run("a", lambda: "l2", lambda: False, large=True))
    await threads.ask("l3", large=True)
    await threads.executor.end("l1")
    with pytest.raises(Unavailable):
        await late
    assert threads.executor.order == ["l1", "l3"]


async def test_beside_others_a_tenant_leaves_a_place_free_and_alone_it_has_all():
    threads = Threads(2)
    await threads.ask("a1", "a2", "a3")
    assert threads.executor.order == ["a1", "a2"]
    await threads.ask("b1", tenant="b")
    await threads.executor.end("a1")
    await threads.executor.end("b1")
    assert threads.executor.order == ["a1", "a2", "b1"]  # and a3 waits, though a place is free
    await threads.ask("b2", tenant="b")
    assert threads.executor.order[3:] == ["b2"]
    await threads.executor.end("a2")
    assert threads.executor.order[4:] == ["a3"]
    for name in ("b2", "a3"):
        await threads.executor.end(name)
    assert not threads.pool._running
