"""One budget for the bodies of both doors: turns, their order, and what is given back."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from triptych.errors import Overloaded
from triptych.proxy.http import body_budget
from triptych.proxy.http.body_budget import BodyBudget


async def started(budget: BodyBudget, principal: str, stack: AsyncExitStack) -> asyncio.Task[object]:
    task = asyncio.create_task(stack.enter_async_context(budget.message(principal)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_a_message_takes_the_largest_until_it_is_there_and_then_its_own() -> None:
    budget = BodyBudget(1000, 100)
    async with budget.message("alice") as room:
        assert budget.nbytes == 100
        room.received(7)
        assert budget.nbytes == 7
    assert budget.nbytes == 0


async def test_a_call_that_ends_before_its_message_gives_all_back() -> None:
    budget = BodyBudget(1000, 100)
    with pytest.raises(ValueError, match="broken"):
        async with budget.message("alice"):
            raise ValueError("broken")
    assert budget.nbytes == 0


async def test_messages_that_are_received_take_half_of_the_budget_and_http_has_the_rest() -> None:
    budget = BodyBudget(1000, 100)
    async with AsyncExitStack() as stack:
        tasks = [await started(budget, f"p{index}", stack) for index in range(8)]
        assert [task.done() for task in tasks] == [True] * 5 + [False] * 3
        assert budget.nbytes == 500
        budget.add(500)
        with pytest.raises(Overloaded):
            budget.add(1)
        budget.remove(500)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert budget.nbytes == 0


async def test_one_principal_gets_half_of_the_turns_and_others_overtake_it() -> None:
    budget = BodyBudget(800, 100)
    async with AsyncExitStack() as stack:
        mallory = [await started(budget, "mallory", stack) for _ in range(20)]
        assert sum(task.done() for task in mallory) == budget.of_one == 2
        alice = await started(budget, "alice", stack)
        assert alice.done()
        for task in mallory:
            task.cancel()
        await asyncio.gather(*mallory, return_exceptions=True)


async def test_without_keys_no_share_is_enforced() -> None:
    budget = BodyBudget(800, 100)
    async with AsyncExitStack() as stack:
        assert all([(await started(budget, "", stack)).done() for _ in range(4)])
        assert budget.nbytes == 400


async def test_turns_come_in_order_as_messages_arrive() -> None:
    budget = BodyBudget(200, 100)
    order: list[int] = []

    async def call(index: int) -> None:
        async with budget.message(f"p{index}") as room:
            order.append(index)
            room.received(1)

    await asyncio.gather(*(call(index) for index in range(50)))
    assert order == list(range(50))
    assert budget.nbytes == 0


async def test_who_waits_in_vain_is_refused_with_the_time_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "WAIT_SECONDS", 0.01)
    budget = BodyBudget(100, 100)
    async with budget.message("alice"):
        with pytest.raises(Overloaded, match="--body-memory") as refused:
            async with budget.message("bob"):
                pass
        assert refused.value.retry_after
        assert budget.nbytes == 100
    assert budget.nbytes == 0


async def test_a_turn_that_comes_to_a_call_that_is_cancelled_goes_on_to_the_next() -> None:
    budget = BodyBudget(200, 100)
    async with AsyncExitStack() as stack, AsyncExitStack() as first:
        await first.enter_async_context(budget.message("alice"))
        bob = await started(budget, "bob", stack)
        carol = await started(budget, "carol", stack)
        # In one step of the loop: bob has his turn, and is cancelled before he runs.
        await first.aclose()
        bob.cancel()
        await asyncio.gather(bob, return_exceptions=True)
        await carol
        assert budget.nbytes == 100
    assert budget.nbytes == 0


async def test_a_body_that_leaves_over_http_lets_a_message_in() -> None:
    budget = BodyBudget(100, 100)
    budget.add(1)
    async with AsyncExitStack() as stack:
        waiting = await started(budget, "alice", stack)
        assert not waiting.done()
        budget.remove(1)
        await waiting
        assert budget.nbytes == 100


async def test_a_message_limit_above_the_budget_is_the_budget() -> None:
    budget = BodyBudget(100, 1000)
    assert budget.message_bytes == 100
    async with budget.message("alice"):
        assert budget.nbytes == 100
