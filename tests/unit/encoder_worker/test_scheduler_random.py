"""The encoder scheduler under random orders of events."""

from __future__ import annotations

import random

import pytest

from support.fakes.encoder_items import scheduler
from triptych.encoder_worker.scheduler import Stage


@pytest.mark.parametrize("seed", range(150))
def test_every_job_of_more_proxies_than_credit_ends(seed: int) -> None:
    """Each of many proxies permits an item of its own, whatever the encoder's credit."""
    rng = random.Random(1000 + seed)
    world = World(rng, credit=rng.choice([1, 2, 3]))
    world.plan_credit = world.tower_credit = rng.choice([5, 12])
    world.play()


@pytest.mark.parametrize("seed", range(150))
def test_every_job_ends_under_any_order_of_events(seed: int) -> None:
    """Plan credit 1, tower credit 1 or 2, room for about one item; cancels and failures in between."""
    World(random.Random(seed)).play()


class World:
    """A proxy, a decoder pool and a tower that act in random order."""

    def __init__(self, rng: random.Random, credit: int = 100) -> None:
        self.rng = rng
        self.credit = credit
        self.memory = 10
        self.patches = rng.choice([1, 4, 100])
        self.s = scheduler(self.memory, self.patches, preparations=rng.choice([1, 2]), credit=credit)
        self.plan_credit = 1
        self.tower_credit = rng.choice([1, 2, 4])
        self.fresh = [f"i{n}" for n in range(12)]
        self.sizes = {key: rng.choice([1, 4, 9, 10, 30]) for key in self.fresh}
        self.costs = {key: rng.choice([0, 1, 3, 50]) for key in self.fresh}
        self.unplanned: set[str] = set()
        self.planned: set[str] = set()
        self.running: set[str] = set()
        self.preparing: set[str] = set()
        self.sending: set[str] = set()
        self.pixels: set[str] = set()
        self.tower: list[str] = []
        self.ended: set[str] = set()

    def play(self) -> None:
        for _ in range(3000):
            self.pump()
            actions = self.possible()
            if not actions:
                break
            action, key = self.rng.choice(actions)
            getattr(self, action)(key)
            self.check()
        assert self.ended == set(self.sizes)
        assert len(self.s.scheduler) == 0
        assert self.s.counts.prepared_bytes == 0

    def possible(self) -> list[tuple[str, str]]:
        actions = []
        if self.fresh and len(self.unplanned) < self.plan_credit:
            actions.append(("start", self.fresh[0]))
        actions += [("send_media", key) for key in sorted(self.sending)]
        actions += [("finish_preparation", key) for key in sorted(self.preparing)]
        if len(self.running) < self.tower_credit:
            actions += [("permit", key) for key in sorted(self.planned)]
        actions += [("finish_tower", "")] if self.tower else []
        if actions and self.rng.random() < 0.03:
            live = sorted((self.unplanned | self.planned | self.running) - set(self.tower))
            actions += [("cancel", key) for key in live]
        return actions

    def start(self, key: str) -> None:
        self.fresh.remove(key)
        self.s.add(key, re_encode=self.rng.random() < 0.2)
        self.unplanned.add(key)
        self.sending.add(key)

    def send_media(self, key: str) -> None:
        self.sending.remove(key)
        assert self.s.needs_media(key)
        self.s.media_arrived(key)

    def finish_preparation(self, key: str) -> None:
        self.preparing.remove(key)
        if self.rng.random() < 0.05:
            self.end(key)
            return
        if key in self.unplanned:
            self.unplanned.remove(key)
            self.planned.add(key)
        self.pixels.add(key)
        self.s.prepared(key, nbytes=self.sizes[key], cost=self.costs[key])

    def permit(self, key: str) -> None:
        self.planned.remove(key)
        self.running.add(key)
        self.s.permit(key)

    def finish_tower(self, _: str) -> None:
        for key in self.tower:
            self.end(key)
        self.tower = []

    def cancel(self, key: str) -> None:
        self.end(key)

    def end(self, key: str) -> None:
        for group in (self.unplanned, self.planned, self.running, self.preparing, self.sending, self.pixels):
            group.discard(key)
        self.s.remove(key)
        self.ended.add(key)

    def pump(self) -> None:
        while (key := self.s.next_preparation()) is not None:
            self.preparing.add(key)
        while (key := self.s.next_media_request()) is not None:
            assert key in self.running
            self.sending.add(key)
        self.pixels -= set(self.s.pop_dropped())
        if not self.tower:
            self.tower = self.s.next_batch()
            assert set(self.tower) <= self.pixels & self.running
            cost = sum(self.costs[key] for key in self.tower)
            assert cost <= self.patches or len(self.tower) == 1

    def check(self) -> None:
        waiting = [item for item in self.s.items.values() if item.pinned and item.stage is not Stage.ENCODING]
        assert len(waiting) <= self.credit
        self.pixels -= set(self.s.pop_dropped())
        held = sum(self.sizes[key] for key in self.pixels)
        assert held == self.s.counts.prepared_bytes
        assert held <= self.memory or len(self.pixels) == 1
