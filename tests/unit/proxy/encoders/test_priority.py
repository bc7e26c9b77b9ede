"""Priorities among a tenant's own encoder jobs, whose turns between tenants stay the same."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from support.data.items import bare_plan
from triptych.proxy.encoders.fair_turns import MAX_PASSED, FairTurns, Turn
from triptych.proxy.encoders.job import EncoderSlot, JobState
from triptych.proxy.encoders.job_table import EncoderJobTable

#: An arrival of a tenant with a priority, or None: the next work begins.
EVENTS = st.lists(
    st.none() | st.tuples(st.sampled_from("abc"), st.integers(-2, 2)), min_size=20, max_size=200
)


def played(events: list[tuple[str, int] | None], *, priorities: bool) -> list[tuple[str, int, int, int]]:
    """(tenant, turn, priority, arrival) of all work as it begins; all have one time to end."""
    turns, waiting, taken = FairTurns(), dict[int, tuple[Turn, int]](), []

    def take() -> None:
        if waiting:
            arrival = min(waiting, key=lambda arrival: waiting[arrival][0].number)
            turn, priority = waiting.pop(arrival)
            turns.begin(turn.number, turn)
            taken.append((turn.tenant, turn.number, priority, arrival))

    for arrival, event in enumerate(events):
        if event is None:
            take()
        else:
            tenant, priority = event
            turn = turns.draw(tenant, str(arrival))
            waiting[arrival] = turn, priority
            turns.hurry(turn, arrival + 60.0, 0.0, priority if priorities else 0)
    while waiting:
        take()
    return taken


@given(EVENTS)
@settings(max_examples=100, deadline=None)
def test_tenants_have_the_turns_that_they_have_without_priorities(events) -> None:
    ordered, plain = played(events, priorities=True), played(events, priorities=False)
    assert [number for _, number, _, _ in ordered] == [number for _, number, _, _ in plain]
    assert Counter(one[:2] for one in ordered) == Counter(one[:2] for one in plain)


@given(EVENTS)
@settings(max_examples=100, deadline=None)
def test_a_tenants_work_is_taken_by_priority_and_equal_work_by_arrival(events) -> None:
    arrivals = [event for event in events if event is not None]
    for tenant in "abc":
        own = [
            (priority, arrival)
            for whose, _, priority, arrival in played(arrivals, priorities=True)
            if whose == tenant
        ]
        assert own == sorted(own)


def test_urgency_counts_among_equals_only() -> None:
    turns = FairTurns()
    patient, urgent, low = (turns.draw("a", name) for name in ("patient", "urgent", "low"))
    turns.hurry(patient, 300.0, 0.0, 0)
    turns.hurry(urgent, 2.0, 0.0, 0)
    turns.hurry(low, 1.0, 0.0, 1)
    assert urgent.number < patient.number < low.number


def test_work_passes_a_bounded_number_as_it_comes() -> None:
    turns = FairTurns()
    waiting = [turns.draw("a") for _ in range(MAX_PASSED + 100)]
    for turn in waiting:
        turns.hurry(turn, 60.0, 0.0, 5)
    assert len(turns.hurry(first := turns.draw("a"), 60.0, 0.0, 0)) == MAX_PASSED
    assert sum(turn.number < first.number for turn in waiting) == 100


def table_of(credit: int, towers: int = 1) -> EncoderJobTable:
    table = EncoderJobTable(1 << 30, lambda plan: 1)
    table.set_encoders([EncoderSlot("e0", ("n",), credit, towers)])
    return table


def preprocessed(table: EncoderJobTable) -> list[str]:
    found: list[str] = []
    while len(started := table.pump(0.0)):
        for each in started:
            found.append(each.mm_hash)
            table.planned(each.try_id, bare_plan(each.mm_hash))
    return found


def test_pictures_are_preprocessed_by_priority_inside_their_tenant() -> None:
    table = table_of(credit=1)
    for name, priority in (("a1", 5), ("a2", 5), ("b1", 9), ("a3", 0), ("b2", 0)):
        table.want(name, f"r{name}", "n", tenant=name[0], priority=priority, deadline=60.0)
    assert preprocessed(table) == ["a3", "b2", "a1", "b1", "a2"]


def test_a_request_of_lower_priority_that_joins_a_picture_brings_it_forward() -> None:
    table = table_of(credit=1)
    for name in ("k0", "k1", "k2"):
        table.want(name, f"r{name}", "n", priority=1, deadline=60.0)
    table.want("k2", "lower", "n", priority=0, deadline=60.0)
    assert preprocessed(table)[0] == "k2"


def test_admitted_requests_run_by_priority_inside_their_tenant() -> None:
    table = table_of(credit=8)
    for name, priority in (("a1", 2), ("a2", 0), ("b1", 5), ("a3", -1)):
        table.want(name, name, "n", tenant=name[0], priority=priority, deadline=60.0)
    preprocessed(table)
    for name in ("a1", "a2", "b1", "a3"):
        table.admit(name)
    ran: list[str] = []
    while jobs := [job for job in table.pump(0.0) if job.state is JobState.RUNNING]:
        for job in jobs:
            ran.append(job.mm_hash)
            assert job.plan is not None
            table.ready(job.try_id, job.plan)
    assert [name for name in ran if name != "b1"] == ["a3", "a2", "a1"]
    assert ran.index("b1") <= 1, "its first turn is as early as that of the other tenant"
