"""Turns of tenants, and deadlines within them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.data.items import bare_plan
from triptych.proxy.encoders import fair_turns
from triptych.proxy.encoders.fair_turns import MAX_OVERTAKEN, FairTurns, Turn
from triptych.proxy.encoders.job import EncoderSlot, JobState
from triptych.proxy.encoders.job_table import EncoderJobTable


@dataclass
class Queue:
    """Work that waits for its turn, as the job table ranks it."""

    turns: FairTurns = field(default_factory=FairTurns)
    waiting: dict[int, Turn] = field(default_factory=dict)
    #: (arrival, tenant, turn) of all that has begun.
    taken: list[tuple[int, str, int]] = field(default_factory=list)

    def arrive(
        self, arrival: int, tenant: str, deadline: float | None = None, work: float = 0.0, priority: int = 0
    ) -> None:
        turn = self.waiting[arrival] = self.turns.draw(tenant, str(arrival))
        if deadline is not None:
            self.turns.hurry(turn, deadline, work, priority)

    def take(self) -> None:
        if self.waiting:
            arrival = min(self.waiting, key=lambda arrival: (self.waiting[arrival].number, arrival))
            turn = self.waiting.pop(arrival)
            self.turns.begin(turn.number)
            self.turns.drop(turn)
            self.taken.append((arrival, turn.tenant, turn.number))


#: An arrival of a tenant with a timeout and seconds of work, or None: the next work begins.
Event = tuple[str, float, float] | None
TIMEOUTS, WORK = st.sampled_from((2.0, 10.0, 60.0, 300.0)), st.sampled_from((0.0, 0.5, 8.0))
EVENTS = st.lists(st.none() | st.tuples(st.sampled_from("abc"), TIMEOUTS, WORK), min_size=40, max_size=400)


def play(events: list[Event], *, deadlines: bool) -> Queue:
    queue = Queue()
    for now, event in enumerate(events):
        if event is None:
            queue.take()
        else:
            queue.arrive(now, event[0], now * 0.1 + event[1] if deadlines else None, event[2])
    while queue.waiting:
        queue.take()
    return queue


@given(EVENTS)
@settings(max_examples=100, deadline=None)
def test_tenants_have_the_turns_that_they_have_without_deadlines(events):
    urgent, plain = play(events, deadlines=True).taken, play(events, deadlines=False).taken
    assert [number for _, _, number in urgent] == [number for _, _, number in plain]
    assert Counter(turn[1:] for turn in urgent) == Counter(turn[1:] for turn in plain)


@given(EVENTS)
@settings(max_examples=100, deadline=None)
def test_one_timeout_for_all_is_the_order_of_arrival(events: list[Event]) -> None:
    alike = [event and (event[0], 60.0, event[2]) for event in events]
    assert play(alike, deadlines=True).taken == play(alike, deadlines=False).taken


@given(EVENTS)
@settings(max_examples=100, deadline=None)
def test_no_work_is_overtaken_by_its_tenant_more_often_than_the_limit(events: list[Event]) -> None:
    with patch.object(fair_turns, "MAX_OVERTAKEN", 3):
        taken = play(events, deadlines=True).taken
    assert sorted(turn[0] for turn in taken) == [now for now, event in enumerate(events) if event is not None]
    for tenant in "abc":
        own = [arrival for arrival, whose, _ in taken if whose == tenant]
        for place, arrival in enumerate(own):
            assert sum(before > arrival for before in own[:place]) <= 3


def test_of_two_with_near_deadlines_the_one_with_more_work_is_first() -> None:
    queue = Queue()
    queue.arrive(0, "a", 20.0, 1.0)
    queue.arrive(1, "a", 19.5, 1.0)
    queue.arrive(2, "a", 19.4, 9.0)
    for _ in range(3):
        queue.take()
    assert [arrival for arrival, _, _ in queue.taken] == [2, 0, 1]


def test_patient_work_is_taken_while_urgent_work_comes_without_end() -> None:
    queue = Queue()
    queue.arrive(0, "a", 300.0)
    for arrival in range(1, 1000):
        queue.arrive(arrival, "a", arrival * 0.01 + 2.0)
        queue.take()
    assert [arrival for arrival, _, _ in queue.taken].index(0) == MAX_OVERTAKEN


def test_work_that_has_begun_gives_its_turn_to_nobody() -> None:
    turns = FairTurns()
    begun = turns.draw("a")
    turns.begin(begun.number)
    turns.drop(begun)
    assert turns.hurry(turns.draw("a"), 1.0) == []
    assert begun.number == 1


def table_of(credit: int) -> EncoderJobTable:
    table = EncoderJobTable(1 << 30, lambda plan: 1)
    table.set_encoders([EncoderSlot("e0", ("n",), credit, 1)])
    return table


def test_an_urgent_picture_is_preprocessed_before_patient_ones() -> None:
    table = table_of(credit=1)
    for number in range(3):
        table.want(f"k{number}", f"r{number}", "n", deadline=300.0)
    table.want("urgent", "r", "n", deadline=10.0)
    planned = []
    while len(planned) < 4:
        for each in table.pump(0.0):
            planned.append(each.mm_hash)
            table.planned(each.try_id, bare_plan(each.mm_hash))
    assert planned == ["urgent", "k0", "k1", "k2"]


def test_an_urgent_request_that_joins_a_picture_brings_it_forward() -> None:
    table = table_of(credit=1)
    for name in ("k0", "k1", "k2"):
        table.want(name, f"r{name}", "n", deadline=300.0)
    table.want("k2", "urgent", "n", deadline=10.0)
    assert [job.mm_hash for job in table.pump(0.0)] == ["k2"]


def encoded(table: EncoderJobTable) -> list[str]:
    """Runs all admitted jobs, one after another."""
    done: list[str] = []
    while runs := table.pump(0.0):
        for each in runs:
            assert each.state is JobState.RUNNING
            done.append(each.mm_hash)
            table.ready(each.try_id, bare_plan(each.mm_hash))
    return done


def admitted(*requests: tuple[str, str, float]) -> EncoderJobTable:
    """A table of planned and admitted requests: each its item's name, its tenant and its deadline."""
    table = table_of(credit=1000)
    for name, tenant, deadline in requests:
        table.want(name, f"r{name}", "n", tenant=tenant, deadline=deadline)
    for each in table.pump(0.0):
        table.planned(each.try_id, bare_plan(each.mm_hash))
    for name, _, _ in requests:
        table.admit(f"r{name}")
    return table


def test_an_urgent_request_is_encoded_before_patient_ones() -> None:
    table = admitted(("a0", "", 300.0), ("a1", "", 300.0), ("urgent", "", 10.0))
    assert encoded(table) == ["urgent", "a0", "a1"]


def test_an_urgent_request_takes_no_turn_of_another_tenant() -> None:
    table = admitted(("a0", "a", 300.0), ("b0", "b", 300.0), ("a1", "a", 300.0), ("urgent", "a", 10.0))
    assert encoded(table) == ["b0", "urgent", "a0", "a1"]


def test_a_request_that_needs_no_tower_keeps_no_turn() -> None:
    table = admitted(("a0", "a", 300.0))
    encoded(table)
    table.admit("nothing to encode")
    assert table._run_turns._waiting == table._plan_turns._waiting == {}


def test_work_of_one_tenant_keeps_its_order_and_a_tenant_that_comes_late_is_next_but_for_one() -> None:
    turns = FairTurns()
    drawn = [turns.draw("a") for _ in range(100)]
    assert [turn.number for turn in drawn] == [*range(1, 101)]
    turns.begin(drawn[9].number)
    assert (turns.draw("b").number, turns.draw("b").number) == (11, 12)


@pytest.mark.parametrize("at_once", [1, 500])
def test_tenants_that_have_gone_are_forgotten(at_once: int) -> None:
    turns = FairTurns()
    for first in range(0, 1000, at_once):
        drawn = [turns.draw(f"tenant {first + number}") for number in range(at_once)]
        turns.begin(drawn[-1].number, *drawn)
    assert len(turns._drawn) <= 65


def test_one_tenants_picture_is_planned_and_encoded_while_another_has_queued_hundreds() -> None:
    table = table_of(credit=1)
    for number in range(300):
        table.want(f"a{number}", f"ra{number}", "n", tenant="a")
    planned: list[str] = []
    encoded: list[str] = []
    for step in range(40):
        if step == 10:
            table.want("b", "rb", "n", tenant="b")
        for each in table.pump(0.0):
            if each.state is JobState.PLANNING:
                planned.append(each.mm_hash)
                table.planned(each.try_id, bare_plan(each.mm_hash))
                table.admit(next(iter(each.waiters)))
            else:
                encoded.append(each.mm_hash)
                table.ready(each.try_id, bare_plan(each.mm_hash))
    assert planned.index("b") <= 12
    assert encoded.index("b") <= 13


def test_one_tenants_admitted_picture_runs_while_another_has_hundreds_admitted() -> None:
    table = admitted(*((f"a{number}", "a", 300.0) for number in range(300)), ("b", "b", 300.0))
    assert encoded(table).index("b") <= 2
