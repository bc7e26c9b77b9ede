"""The store counts as out of reach after a silence that is longer than one late ping."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from support.beats import StandingLoop
from support.waiting import until
from triptych.registry import registry as module
from triptych.registry.registry import StorePatience, StoreReach


class Store:
    """Answers pings while it is `there`."""

    def __init__(self) -> None:
        self.there = True
        self.pings = 0
        self.told: list[bool] = []
        self.failed = 0
        self.reach = StoreReach(self.ping, self.tell, self.fail)

    async def ping(self) -> bool:
        self.pings += 1
        return self.there

    async def tell(self, reaches: bool) -> None:
        self.told.append(reaches)

    def fail(self) -> None:
        self.failed += 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PING_INTERVAL", 0.001)
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.05)


async def test_a_change_is_told_once_and_what_waits_is_failed_again_and_again() -> None:
    store = Store()
    async with store.reach:
        await until(lambda: store.pings > 3)
        assert (store.told, store.failed, store.reach.reaches) == ([True], 0, True)
        store.there = False
        await until(lambda: store.failed > 2)
        assert (store.told, store.reach.reaches) == ([True, False], False)
        store.there = True
        await until(lambda: store.reach.reaches)
        failed = store.failed
        pings = store.pings
        await until(lambda: store.pings > pings + 3)
        assert (store.told, store.failed) == ([True, False, True], failed)


async def test_a_ping_that_hangs_is_an_answer_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PING_SECONDS", 0.01)
    store = Store()

    async def hang() -> bool:
        await asyncio.Event().wait()
        return True

    async with StoreReach(hang, store.tell, store.fail):
        await until(lambda: store.failed > 2)
    assert store.told == [True, False]


async def test_a_pause_of_the_process_itself_does_not_bring_a_store_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    store.there = False
    async with store.reach:
        await until(lambda: store.failed > 2)
        StandingLoop(monkeypatch).stand_still(10.0)
        failed = store.failed
        await until(lambda: store.failed > failed + 2 or store.reach.reaches)
        assert store.told == [True, False]
        store.there = True
        await until(lambda: store.reach.reaches)
    assert store.told == [True, False, True]


async def test_an_error_in_what_follows_is_logged_and_does_not_end_the_pings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store()

    def fail() -> None:
        store.failed += 1
        raise RuntimeError("a bug")

    store.there = False
    async with StoreReach(store.ping, store.tell, fail):
        await until(lambda: store.failed > 2)
    assert "could not be carried out" in caplog.text and "a bug" in caplog.text


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


async def test_in_a_hurry_a_few_times_what_answers_took_are_waited_for_at_most(monkeypatch) -> None:
    asked = list[float]()
    monkeypatch.setattr(asyncio, "timeout", lambda seconds: asked.append(seconds) or nullcontext())
    patience = StorePatience()
    for hurry in (False, True):
        async with patience.asked(60, hurry=hurry):
            pass
    assert asked == [60, module.HURRY_SECONDS]
