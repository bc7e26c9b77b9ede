"""The encoder cache, and the device memory that it shares."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from support.engine.engine_requests import (
    STORE,
    Make,
    ModellessEngine,
    finished,
    make_feature,
    make_request,
    publish,
)
from triptych.base.errors import Unavailable
from triptych.base.types import FinishReason, ItemPlan
from triptych.pd_worker.core.encoder_cache import EncoderCache, Residency
from triptych.pd_worker.core.items.tracker import MAX_MOVES


def item(name: str, rows: int) -> ItemPlan:
    """A row has 16 bytes."""
    return make_feature(name, 0, rows).plan


def load(cache: EncoderCache, holder: tuple[str, int], plan: ItemPlan, deadline: float = 9.0) -> None:
    assert cache.acquire(holder, plan) is Residency.ABSENT
    assert cache.reserve(holder, plan, deadline)


def test_an_item_is_ready_only_after_commit() -> None:
    cache, plan = EncoderCache(160), item("a", 4)
    load(cache, ("r", 0), plan)
    assert cache.acquire(("r", 0), plan) is Residency.PENDING
    cache.commit(plan.mm_hash)
    assert cache.acquire(("r", 0), plan) is Residency.READY


def test_a_request_preempted_before_its_load_ran_does_not_leave_the_item_ready() -> None:
    cache, plan = EncoderCache(160), item("a", 4)
    load(cache, ("r", 0), plan)
    cache.release_request("r")
    assert cache.acquire(("other", 0), plan) is Residency.PENDING
    cache.fail(plan.mm_hash)
    assert cache.acquire(("other", 0), plan) is Residency.ABSENT
    assert cache.used == cache.references == 0


def test_releasing_twice_is_releasing_once() -> None:
    cache, plan = EncoderCache(160), item("a", 4)
    load(cache, ("r", 0), plan)
    cache.commit(plan.mm_hash)
    cache.acquire(("s", 0), plan)
    for _ in range(3):
        cache.release(("r", 0))
        cache.release_request("r")
    assert cache.references == 1
    assert cache.used == plan.nbytes


def test_the_same_item_twice_in_one_request_stays_until_its_last_place_is_consumed() -> None:
    cache, plan, other = EncoderCache(160), item("a", 6), item("b", 6)
    load(cache, ("r", 0), plan)
    assert cache.acquire(("r", 1), plan) is Residency.PENDING
    cache.commit(plan.mm_hash)
    cache.release(("r", 0))
    assert cache.acquire(("s", 0), other) is Residency.NO_SPACE
    cache.release(("r", 1))
    assert cache.acquire(("s", 0), other) is Residency.ABSENT


def test_an_item_above_the_capacity_is_too_big_and_holds_nothing() -> None:
    cache = EncoderCache(160)
    assert cache.acquire(("r", 0), item("a", 11)) is Residency.TOO_BIG
    assert cache.references == cache.used == 0


def test_no_room_holds_no_reference() -> None:
    cache = EncoderCache(160)
    load(cache, ("r", 0), item("a", 8))
    assert cache.acquire(("s", 0), item("b", 8)) is Residency.NO_SPACE
    assert not cache.reserve(("s", 0), item("b", 8), 9.0)
    assert cache.references == 1


def test_the_least_recently_used_item_without_references_goes_first() -> None:
    cache = EncoderCache(160)
    plans = [item(name, 5) for name in "abc"]
    for index, plan in enumerate(plans[:2]):
        load(cache, ("r", index), plan)
        cache.commit(plan.mm_hash)
    cache.release(("r", 0))
    cache.release(("r", 1))
    cache.acquire(("s", 0), plans[0])
    cache.release(("s", 0))
    load(cache, ("t", 0), plans[2])
    assert cache.drain_evicted() == [plans[1].mm_hash]
    assert cache.drain_evicted() == []


def test_an_eviction_notice_never_names_a_key_that_came_back_in_the_same_pass() -> None:
    cache, plan, other = EncoderCache(160), item("a", 10), item("b", 10)
    load(cache, ("r", 0), plan)
    cache.commit(plan.mm_hash)
    cache.release(("r", 0))
    load(cache, ("s", 0), other)
    cache.fail(other.mm_hash)
    load(cache, ("r", 0), plan)
    assert plan.mm_hash not in cache.drain_evicted()


def test_a_pending_item_past_its_deadline_is_given_up_and_dropped_at_the_worker() -> None:
    cache, plan = EncoderCache(160), item("a", 4)
    load(cache, ("r", 0), plan, deadline=5.0)
    assert cache.expire(5.0) == []
    assert cache.expire(5.1) == [plan.mm_hash]
    assert cache.drain_evicted() == [plan.mm_hash]
    assert cache.used == cache.references == 0


def test_a_late_report_of_an_item_given_up_is_an_eviction_not_an_entry() -> None:
    cache, plan = EncoderCache(160), item("a", 4)
    cache.commit(plan.mm_hash)
    assert cache.state(plan.mm_hash) is Residency.ABSENT
    assert cache.drain_evicted() == [plan.mm_hash]


class Adversary:
    """Requests consume items in order under late results, failures, preemption and double release."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        capacity = self.random.randint(20, 120)
        self.cache = EncoderCache(capacity * 16)
        self.plans = [
            item(f"{seed}-{i}", self.random.randint(1, max(1, capacity // 2)))
            for i in range(self.random.randint(2, 10))
        ]
        self.requests = {
            f"r{i}": [self.random.choice(self.plans) for _ in range(self.random.randint(1, 4))]
            for i in range(self.random.randint(1, 10))
        }
        self.done = dict.fromkeys(self.requests, 0)
        self.worker: set[str] = set()
        self.flight: list[tuple[int, str]] = []
        self.step = 0

    def run(self) -> None:
        while self.requests:
            self.step += 1
            assert self.step < 2000, "no progress"
            for request_id in list(self.requests):
                self._advance(request_id)
            if self.random.random() < 0.3:
                self._preempt()
            for key in self.cache.drain_evicted():
                assert self.cache.state(key) is Residency.ABSENT
                self.worker.discard(key)
            self._results()
            self._check()
        for _, key in self.flight:
            self.cache.fail(key)
        assert self.cache.references == 0

    def _advance(self, request_id: str) -> None:
        """One item at a time, so that an item alone always fits sooner or later."""
        plans, index = self.requests[request_id], self.done[request_id]
        residency = self.cache.acquire((request_id, index), plans[index])
        if residency is Residency.ABSENT:
            assert self.cache.reserve((request_id, index), plans[index], self.step + 50)
            self.flight.append((self.step + self.random.randint(0, 2), plans[index].mm_hash))
        elif residency is Residency.READY:
            assert plans[index].mm_hash in self.worker, "ready without data"
            if self.random.random() < 0.7:
                for _ in range(self.random.randint(1, 2)):
                    self.cache.release((request_id, index))
                self.done[request_id] += 1
        if self.done[request_id] == len(plans):
            self.cache.release_request(request_id)
            del self.requests[request_id]

    def _preempt(self) -> None:
        if self.requests:
            request_id = self.random.choice(list(self.requests))
            self.cache.release_request(request_id)
            self.done[request_id] = 0

    def _results(self) -> None:
        due = [entry for entry in self.flight if entry[0] <= self.step]
        self.flight = [entry for entry in self.flight if entry[0] > self.step]
        for _, key in due:
            if self.random.random() < 0.1:
                self.cache.fail(key)
            else:
                self.worker.add(key)
                self.cache.commit(key)

    def _check(self) -> None:
        resident = [plan for plan in {plan.mm_hash: plan for plan in self.plans}.values()]
        used = sum(p.nbytes for p in resident if self.cache.state(p.mm_hash) is not Residency.ABSENT)
        assert used == self.cache.used <= self.cache.capacity
        for plan in resident:
            if self.cache.state(plan.mm_hash) is Residency.READY:
                assert plan.mm_hash in self.worker
        assert self.cache.references <= sum(len(plans) for plans in self.requests.values())


@pytest.mark.parametrize("block", range(4))
def test_the_invariants_hold_under_late_results_failures_and_preemption(block: int) -> None:
    for seed in range(block * 150, (block + 1) * 150):
        Adversary(seed).run()


class Device:
    """Counts moves to an engine's device, and loads from its store; moves fail for which it is `full`."""

    def __init__(self, engine: ModellessEngine, full: Callable[[int], bool]) -> None:
        self.moves = self.loads = 0
        worker: Any = engine.worker
        move, fetch = worker._on_device, worker._fetch

        def on_device(entry: object) -> object:
            self.moves += 1
            if full(self.moves):
                raise MemoryError("cuda:0 has no 1024 bytes free")
            return move(entry)

        def fetched(order: object) -> None:
            self.loads += 1
            fetch(order)

        worker._on_device, worker._fetch = on_device, fetched


def test_a_move_that_finds_no_memory_is_made_again_without_another_load(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    device = Device(engine, lambda moves: moves < MAX_MOVES)
    publish(STORE, image)
    engine.add(make_request("a", 16, [image]))
    engine.run_out()
    assert finished(engine)["a"].reason is FinishReason.LENGTH
    assert (device.moves, device.loads) == (MAX_MOVES, 1)
    assert len(engine.of("item_loaded")) == 1 and not engine.of("item_missing")


def test_a_request_whose_item_never_fits_goes_on_elsewhere_and_nothing_is_encoded_again(make):
    engine, image = make(), make_feature("cat", 2, 6)
    device = Device(engine, lambda moves: True)
    publish(STORE, image)
    engine.add(make_request("a", 16, [image]), make_request("b", 16))
    engine.run_out()
    error = finished(engine)["a"].error
    assert isinstance(error, Unavailable) and "no free memory for an item's embedding" in error.message
    assert finished(engine)["b"].reason is FinishReason.LENGTH
    assert (device.moves, device.loads) == (MAX_MOVES, 1) and not engine.of("item_missing")


def test_embeddings_that_nobody_needs_make_room_on_the_device(make: Make) -> None:
    engine, old, new = make(), make_feature("old", 2, 6), make_feature("new", 2, 6)
    publish(STORE, old, new)
    engine.add(make_request("a", 16, [old]))
    engine.run_out()
    assert old.mm_hash in engine.resident
    device = Device(engine, lambda moves: old.mm_hash in engine.resident)
    engine.add(make_request("b", 16, [new]))
    engine.run_out()
    assert finished(engine)["b"].reason is FinishReason.LENGTH
    assert device.moves == 2 and old.mm_hash not in engine.resident
