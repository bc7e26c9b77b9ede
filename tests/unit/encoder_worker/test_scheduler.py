"""The batches of the encoder's scheduler."""

from __future__ import annotations

import random
from dataclasses import dataclass

from triptych.encoder_worker.scheduler import EncoderItem, EncoderScheduler, SchedulerCounts, Stage


@dataclass(eq=False, slots=True)
class Keyed(EncoderItem):
    key: str = ""
    dropped: bool = False

    def drop_pixels(self) -> None:
        EncoderItem.drop_pixels(self)
        self.dropped = True


class Keys:
    """A scheduler whose items have names, and which notes whose pixels were dropped."""

    def __init__(self, memory: int, patches: int, preparations: int, credit: int) -> None:
        self.scheduler = EncoderScheduler[Keyed](
            prepared_memory=memory, batch_patches=patches, preparations=preparations, tower_credit=credit
        )
        self.items: dict[str, Keyed] = {}

    def add(self, key: str, *, re_encode: bool = False, looked_up: bool = True, priority: int = 0) -> None:
        self.items[key] = Keyed(key=key, re_encode=re_encode, looked_up=looked_up, priority=priority)
        self.scheduler.add(self.items[key])

    def remove(self, key: str) -> None:
        """Its decode, if it is in one, ends with it."""
        item = self.items.pop(key)
        self.scheduler.remove(item)
        self.scheduler.decoded(item)

    def needs_media(self, key: str) -> bool:
        return self.scheduler.needs_media(self.items[key])

    def media_arrived(self, key: str) -> None:
        self.scheduler.media_arrived(self.items[key])

    def media_lost(self, key: str) -> None:
        self.scheduler.media_lost(self.items[key])

    def permit(self, key: str) -> None:
        self.scheduler.permit(self.items[key])

    def withdraw(self, key: str) -> None:
        self.scheduler.withdraw(self.items[key])

    def prepared(self, key: str, *, nbytes: int, cost: int) -> None:
        self.scheduler.prepared(self.items[key], nbytes=nbytes, cost=cost)

    def next_preparation(self) -> str | None:
        return _key(self.scheduler.next_preparation())

    def next_media_request(self) -> str | None:
        return _key(self.scheduler.next_media_request())

    def next_batch(self) -> list[str]:
        return [item.key for item in self.scheduler.next_batch()]

    def waiting(self) -> list[str]:
        return [item.key for item in self.scheduler.waiting()]

    def pop_dropped(self) -> list[str]:
        dropped = [item for item in self.items.values() if item.dropped]
        for item in dropped:
            item.dropped = False
        return [item.key for item in sorted(dropped, key=lambda i: i.prepared_at or 0)]

    @property
    def counts(self) -> SchedulerCounts:
        return self.scheduler.counts()


def _key(item: Keyed | None) -> str | None:
    return None if item is None else item.key


def scheduler(memory: int = 100, patches: int = 10, preparations: int = 4, credit: int = 100) -> Keys:
    return Keys(memory, patches, preparations, credit)


def plan(s: Keys, key: str, *, nbytes: int = 10, cost: int = 1, re_encode: bool = False) -> None:
    s.add(key, re_encode=re_encode)
    s.media_arrived(key)
    assert s.next_preparation() == key
    s.prepared(key, nbytes=nbytes, cost=cost)


def run(s: Keys, *keys: str) -> None:
    for key in keys:
        s.permit(key)


def test_a_new_item_is_looked_up_once_and_before_it_is_preprocessed() -> None:
    s = scheduler()
    s.add("a", looked_up=False)
    s.items["a"].looked_up = None
    s.media_arrived("a")
    assert s.next_preparation() is None
    assert _key(s.scheduler.next_look_up()) == "a"
    assert s.scheduler.next_look_up() is None
    assert s.next_preparation() is None
    s.items["a"].looked_up = True
    assert s.next_preparation() == "a"


def test_permission_before_the_media_is_kept() -> None:
    s = scheduler()
    s.add("a")
    run(s, "a")
    s.media_arrived("a")
    s.next_preparation()
    s.prepared("a", nbytes=1, cost=1)
    assert s.next_batch() == ["a"]


def test_batches_follow_run_order_and_not_arrival() -> None:
    s = scheduler()
    for key in "abc":
        plan(s, key)
    run(s, "c", "a", "b")
    assert s.next_batch() == ["c", "a", "b"]


def test_re_encodes_are_encoded_first() -> None:
    s = scheduler()
    plan(s, "a")
    plan(s, "b", re_encode=True)
    run(s, "a", "b")
    assert s.next_batch() == ["b", "a"]


def test_re_encodes_are_preprocessed_first() -> None:
    s = scheduler(preparations=1)
    for key in "ab":
        s.add(key, re_encode=key == "b")
        s.media_arrived(key)
    assert s.next_preparation() == "b"


def test_items_without_permission_are_preprocessed_by_priority() -> None:
    s = scheduler()
    for key, priority in {"a": 9, "b": 3, "c": 5, "d": 3, "e": 8}.items():
        s.add(key, priority=priority)
        s.media_arrived(key)
    # Their places in the tower's queue are others' too.
    run(s, "e", "c")
    order = []
    while (key := s.next_preparation()) is not None:
        order.append(key)
        s.prepared(key, nbytes=1, cost=1)
    assert order == ["e", "c", "b", "d", "a"]


def test_no_more_items_are_in_preprocessing_than_allowed() -> None:
    s = scheduler(preparations=1)
    for key in "ab":
        s.add(key)
        s.media_arrived(key)
    assert s.next_preparation() == "a"
    assert s.next_preparation() is None
    s.prepared("a", nbytes=1, cost=1)
    assert s.next_preparation() == "b"


def test_a_batch_stays_within_the_patch_budget() -> None:
    s = scheduler(patches=10)
    for key, cost in {"a": 6, "b": 4, "c": 1}.items():
        plan(s, key, cost=cost)
    run(s, "a", "b", "c")
    assert s.next_batch() == ["a", "b"]
    assert s.next_batch() == ["c"]


def test_an_item_above_the_budget_runs_alone_and_is_not_overtaken() -> None:
    s = scheduler(patches=10)
    for key, cost in {"a": 1, "big": 50, "c": 1}.items():
        plan(s, key, cost=cost)
    run(s, "a", "big", "c")
    assert [s.next_batch() for _ in range(3)] == [["a"], ["big"], ["c"]]


def test_withdrawn_permission_keeps_the_item_from_the_tower() -> None:
    s = scheduler()
    plan(s, "a")
    run(s, "a")
    s.withdraw("a")
    assert s.next_batch() == []
    assert s.counts.planned == 1


def test_over_the_memory_the_oldest_pixels_without_permission_are_dropped() -> None:
    s = scheduler(memory=20)
    plan(s, "a")
    plan(s, "b")
    run(s, "a")
    plan(s, "c")
    assert s.pop_dropped() == ["b"]
    assert s.counts.prepared_bytes == 20


def test_dropped_pixels_are_asked_for_again_when_the_item_may_run() -> None:
    s = scheduler(memory=10)
    plan(s, "a")
    plan(s, "b")
    assert s.pop_dropped() == ["a"]
    assert s.next_media_request() is None
    run(s, "a")
    assert s.next_media_request() == "a"
    assert s.pop_dropped() == ["b"]
    assert s.next_media_request() is None


def test_media_are_asked_for_again_only_when_there_is_room() -> None:
    s = scheduler(memory=10)
    plan(s, "a")
    plan(s, "b")
    run(s, "b", "a")
    assert s.next_media_request() is None
    assert s.next_batch() == ["b"]
    s.remove("b")
    assert s.next_media_request() == "a"


def test_an_item_larger_than_the_memory_is_held_alone() -> None:
    s = scheduler(memory=10)
    plan(s, "huge", nbytes=1000)
    assert s.pop_dropped() == []
    run(s, "huge")
    assert s.next_batch() == ["huge"]


def test_media_that_are_not_needed_are_not_accepted() -> None:
    s = scheduler()
    plan(s, "a")
    assert not s.needs_media("a")


def test_media_lost_on_the_way_are_asked_for_again() -> None:
    s = scheduler(memory=10)
    plan(s, "a")
    plan(s, "b")
    run(s, "a")
    assert s.next_media_request() == "a"
    s.media_lost("a")
    assert s.next_media_request() == "a"


def test_no_more_items_than_the_credit_hold_pixels_whichever_proxy_permits_them() -> None:
    s = scheduler(memory=40, patches=1, credit=2)
    for key in "abcd":
        plan(s, key)
    run(s, *"abcd")
    assert sorted(s.waiting()) == list("abcd")
    plan(s, "new", nbytes=20)
    assert s.pop_dropped() == ["c", "d"]
    assert s.next_media_request() is None
    assert s.next_batch() == ["a"]
    s.remove("a")
    assert s.next_media_request() == "c"
    assert s.next_media_request() is None


def test_places_go_to_re_encodes_first_and_then_in_order_of_permission() -> None:
    s = scheduler(credit=1, patches=1)
    for key in "abc":
        plan(s, key, re_encode=key == "c")
    run(s, *"bac")
    order = []
    for _ in range(3):
        (key,) = s.next_batch()
        order.append(key)
        s.remove(key)
    assert order == ["b", "c", "a"]


def test_a_place_is_free_again_when_its_item_leaves_or_loses_permission() -> None:
    s = scheduler(credit=1)
    for key in "abc":
        plan(s, key)
    run(s, *"abc")
    s.withdraw("a")
    assert s.next_batch() == ["b"]
    s.remove("b")
    assert s.next_batch() == ["c"]


def test_an_item_that_is_not_planned_takes_no_place() -> None:
    s = scheduler(credit=1)
    s.add("late")
    s.permit("late")
    plan(s, "here")
    run(s, "here")
    assert s.next_batch() == ["here"]


def test_every_job_of_more_proxies_than_credit_ends() -> None:
    """Each of many proxies permits an item of its own, whatever the encoder's credit."""
    for seed in range(150):
        rng = random.Random(1000 + seed)
        world = World(rng, credit=rng.choice([1, 2, 3]))
        world.plan_credit = world.tower_credit = rng.choice([5, 12])
        world.play()


def test_every_job_ends_under_any_order_of_events() -> None:
    """Plan credit 1, tower credit 1 or 2, room for about one item; cancels and failures in between."""
    for seed in range(150):
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
