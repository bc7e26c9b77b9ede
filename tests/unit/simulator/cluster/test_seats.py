"""Threads that keep to cores, work that rides on others, and short work beside both."""

from __future__ import annotations

import math

import pytest

from triptych.simulator.cluster.clock import Clock
from triptych.simulator.cluster.processors import Host


def ends(cores: float, *threads: tuple[str, float, float]) -> dict[str, float]:
    """When the work of each thread of (name, start, seconds) ends."""
    clock, found = Clock(), {}
    host = Host(clock, cores)

    def start(name: str, seconds: float) -> None:
        host.start(seconds, lambda: found.__setitem__(name, clock.now), thread=name)

    for name, at, seconds in threads:
        clock.at(at, start, name, seconds)
    clock.run()
    assert host.used_seconds == pytest.approx(math.fsum(seconds for _, _, seconds in threads))
    return found


def test_the_third_thread_of_two_cores_shares_one_and_leaves_the_other_alone() -> None:
    found = ends(2, ("a", 0, 1), ("b", 0, 2), ("c", 0.5, 0.25))
    # c is with a, at half speed, until both are through; b never notices.
    assert found == pytest.approx({"a": 1.25, "b": 2.0, "c": 1.0})


def test_a_core_that_falls_idle_takes_a_thread_from_the_fullest() -> None:
    found = ends(2, ("a", 0, 2), ("b", 0, 1), ("c", 0, 2))
    # a and c share a core until b has gone at 1; then each has its own.
    assert found == pytest.approx({"b": 1.0, "a": 2.5, "c": 2.5})


def test_a_thread_that_goes_on_at_once_finds_its_core_as_it_was() -> None:
    clock, found = Clock(), []
    host = Host(clock, 2)

    def step(left: int) -> None:
        found.append(clock.now)
        if left:
            host.start(0.1, lambda: step(left - 1), thread="steps")

    host.start(9.0, None, thread="other")
    step(10)
    host.start(0.5, None, thread="tower")
    clock.run()
    # The tower is beside the other one's core or the steps': not in turns on whichever was idle for no time.
    assert found[-1] in (pytest.approx(1.0), pytest.approx(1.5))


def test_a_heavier_thread_has_more_of_its_core() -> None:
    clock, found = Clock(), {}
    host = Host(clock, 2)
    for name, weight in (("full", 9.0), ("heavy", 3.0), ("light", 1.0)):
        host.start(3.0, lambda name=name: found.__setitem__(name, clock.now), thread=name, weight=weight)
    clock.run()
    assert found["full"] == pytest.approx(3.0)
    # light joined heavy's core: 3 of 4 parts until the full one's core falls idle.
    assert found["heavy"] == pytest.approx(3.75)


def test_work_that_rides_takes_cores_at_the_speed_of_its_task() -> None:
    clock, found = Clock(), []
    host = Host(clock, 1)
    host.start(1.0, lambda: found.append(clock.now), riders={"proxy": 0.25})
    clock.run()
    # A quarter of a core more than there is: all goes at 0.8 of its speed.
    assert found == pytest.approx([1.25])
    assert host.used == pytest.approx({"": 1.0, "proxy": 0.25})


def test_short_work_finds_the_idle_core_and_slows_no_thread() -> None:
    clock, found = Clock(), {}
    host = Host(clock, 2)
    host.start(1.0, lambda: found.__setitem__("thread", clock.now), thread="a")
    for index in range(2):
        host.start(0.25, lambda index=index: found.__setitem__(index, clock.now))
    clock.run()
    assert found["thread"] <= 1.25 and found[0] == found[1]


@pytest.mark.parametrize(
    ("threads", "crowding"), [(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0)], ids=["idle", "one", "full", "over"]
)
def test_a_wake_up_waits_where_no_core_is_free(threads: int, crowding: float) -> None:
    host = Host(Clock(), 2)
    for index in range(threads):
        host.start(1.0, None, thread=index)
    assert host.crowding == crowding
    assert Host(Clock(), math.inf).crowding == 0.0
