"""Requests before vLLM: places in its batch, memory, shares of prefill, tries and replays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from triptych.pd_worker.core.tenant_turns import TenantTurns
from triptych.pd_worker.vllm.attempt import Diverged, Replay
from triptych.pd_worker.vllm.places import BatchPlaces, EmbeddingMemory
from triptych.pd_worker.vllm.run import MAX_FAILURES, PrefillShares, Retries


def order(arrival: float, *, resumed: bool = False) -> tuple[bool, float, str]:
    return (not resumed, arrival, f"r{arrival}")


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_start_in_order_and_resumed_ones_first():
    places, started = BatchPlaces(1, TenantTurns()), []

    async def work(name: str, at: tuple[bool, float, str]) -> None:
        async with places.place(at, ""):
            started.append(name)
            await asyncio.sleep(0)

    async with places.place(order(0.0), ""):
        tasks = [
            asyncio.create_task(work(name, at))
            for name, at in (
                ("late", order(3.0)),
                ("early", order(1.0)),
                ("resumed", order(9.0, resumed=True)),
            )
        ]
        await settled()
        assert started == []
    await asyncio.gather(*tasks)
    assert started == ["resumed", "early", "late"]


async def test_a_wait_cancelled_after_its_turn_came_gives_the_place_back():
    places = BatchPlaces(1, TenantTurns())

    async def work() -> None:
        async with places.place(order(1.0), ""):
            raise AssertionError("it was cancelled")

    async with places.place(order(0.0), ""):
        task = asyncio.create_task(work())
        await settled()
    # The place is the task's now, which has not run since.
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5), places.place(order(2.0), ""):
        pass


class Batch:
    """Requests at work in a batch of so many places, each until its gate opens or it is asked to leave."""

    def __init__(self, places: int) -> None:
        self.turns, self.left, self.gate = TenantTurns(), 0, asyncio.Event()
        self.places = BatchPlaces(places, self.turns, self.gave_way)
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def gave_way(self) -> None:
        self.left += 1

    def add(self, *names: str) -> None:
        """A tenant is the first letter of a name."""
        for name in names:
            self.turns.add(name[0])
            self.tasks.append(asyncio.create_task(self.work(name, order(float(len(self.tasks))))))

    async def work(self, name: str, at: tuple[bool, float, str]) -> None:
        done = False
        while not done:
            async with self.places.place(at, name[0]) as place:
                self.order.append(name)
                leave = asyncio.Event()
                place.leave = leave.set
                ends = [asyncio.create_task(event.wait()) for event in (self.gate, leave)]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                done = self.gate.is_set()
                for end in ends:
                    end.cancel()


async def test_the_tenant_with_most_places_leaves_its_latest_to_one_that_has_none():
    batch = Batch(3)
    batch.add("a1", "a2", "a3", "a4")
    await settled()
    batch.add("b1", "b2")
    await settled()
    assert batch.order == ["a1", "a2", "a3", "b1"]
    assert batch.left == 1, "one, however many the other tenant wants"
    batch.gate.set()
    await asyncio.gather(*batch.tasks)
    assert sorted(batch.order[4:]) == ["a3", "a4", "b2"]


async def test_a_place_that_becomes_free_goes_to_the_tenant_that_has_had_least():
    batch = Batch(2)
    batch.add("a1", "b1", "a2", "a3")
    await settled()
    batch.add("b2")
    for tenant, tokens in (("a", 100), ("b", 1)):
        batch.turns.charge(tenant, tokens)
    batch.gate.set()
    await asyncio.gather(*batch.tasks)
    assert batch.order.index("b2") < batch.order.index("a3")
    assert batch.left == 0, "each has one"


async def test_bytes_are_reserved_together_in_order_and_shared_by_key():
    room = EmbeddingMemory(100, TenantTurns())
    await room.reserve("a", order(0.0), {"x": 60}, "")
    await room.reserve("b", order(1.0), {"x": 60}, "")
    assert room.reserved == 60
    big = asyncio.create_task(room.reserve("c", order(2.0), {"y": 60}, ""))
    small = asyncio.create_task(room.reserve("d", order(3.0), {"z": 10}, ""))
    await settled()
    assert not big.done() and not small.done()
    room.release("a")
    await settled()
    assert not big.done()
    room.release("b")
    await asyncio.gather(big, small)
    assert room.reserved == 70


def shared_seconds(*steps: tuple[float, str, object]) -> dict[str, float]:
    """The seconds of prompts of 30 tokens ("long") and 10 ("short") after `steps`: (time, "begin", name) …"""
    states = {name: SimpleNamespace(num_prompt_tokens=n, work_seconds=0.0) for name, n in TOKENS.items()}
    shares = PrefillShares()
    for now, action, what in steps:
        if action == "count":
            shares.decoded += what
        else:
            getattr(shares, action)(states[what], now)
    return {name: state.work_seconds for name, state in states.items()}


TOKENS = {"long": 30, "short": 10}


def test_a_prompt_alone_takes_the_seconds_up_to_its_first_token():
    steps = ((5.0, "begin", "long"), (7.0, "end", "long"), (9.0, "end", "long"), (9.0, "begin", "short"))
    assert shared_seconds(*steps) == {"long": 2.0, "short": 0.0}


def test_prompts_share_the_seconds_by_their_tokens():
    steps = ((0.0, "begin", "long"), (1.0, "begin", "short"), (3.0, "end", "long"), (4.0, "end", "short"))
    assert shared_seconds(*steps) == {"long": 1.0 + 1.5, "short": 0.5 + 1.0}


def test_tokens_that_are_decoded_meanwhile_have_their_share():
    steps = ((0.0, "begin", "short"), (1.0, "count", 30), (2.0, "end", "short"), (2.0, "count", 70))
    assert shared_seconds(*steps)["short"] == 0.5
    later = (*steps, (3.0, "begin", "long"), (4.0, "end", "long"))
    assert shared_seconds(*later)["long"] == 1.0


def test_failures_in_a_row_end_a_request():
    retries = Retries()
    pauses = [retries.pause(busy=False) for _ in range(MAX_FAILURES)]
    assert pauses == [0.1, 0.2, 0.4, None]


def test_a_request_that_comes_further_has_all_its_tries_again():
    retries = Retries()
    for _ in range(MAX_FAILURES - 1):
        retries.pause(busy=False)
    retries.reset()
    assert retries.pause(busy=False) == 0.1


def test_a_busy_server_is_asked_ever_more_rarely_and_never_given_up():
    retries = Retries()
    pauses = [retries.pause(busy=True) for _ in range(100)]
    assert pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0] and set(pauses[5:]) == {2.0}
    assert retries.failures == 0


def test_known_tokens_are_dropped_and_later_ones_are_new():
    replay = Replay((5, 6))
    assert [replay.is_new(token) for token in (5, 6, 5)] == [False, False, True]


def test_another_token_than_before_is_a_divergence():
    replay = Replay((5, 6))
    replay.is_new(5)
    with pytest.raises(Diverged, match="output token 1 is 7, and was 6"):
        replay.is_new(7)
