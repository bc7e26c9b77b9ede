from __future__ import annotations

import math

import pytest

from triptych.simulator.cluster.clock import Clock
from triptych.simulator.cluster.processors import Host, Turn


def ends(cores: float, *tasks: tuple[float, float, float, float]) -> list[float]:
    """When each task of (start, seconds, threads, weight) ends."""
    clock, found = Clock(), [math.nan] * len(tasks)
    host = Host(clock, cores)

    def start(index: int) -> None:
        _, seconds, threads, weight = tasks[index]
        host.start(seconds, lambda: found.__setitem__(index, clock.now), threads=threads, weight=weight)

    for index, task in enumerate(tasks):
        clock.at(task[0], start, index)
    clock.run()
    worked = math.fsum(seconds * min(threads, cores) for _, seconds, threads, _ in tasks)
    assert host.used_seconds == pytest.approx(worked), "work is neither lost nor made"
    return found


def test_moments_come_in_order_and_equal_ones_in_the_order_of_asking() -> None:
    clock, seen = Clock(), []
    for moment, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.at(moment, seen.append, name)
    clock.at(1.5, seen.append, "never").cancel()
    clock.run()
    assert seen == ["a", "b", "c"] and clock.now == 2.0


def test_tasks_that_find_a_core_each_do_not_slow_each_other() -> None:
    assert ends(2, (0, 1, 1, 1), (0, 3, 1, 1)) == pytest.approx([1, 3])


def test_two_tasks_on_one_core_go_at_half_their_speed_while_both_are_there() -> None:
    assert ends(1, (0, 1, 1, 1), (0, 2, 1, 1)) == pytest.approx([2, 3])


def test_a_task_that_comes_later_takes_its_share_from_then_on() -> None:
    assert ends(1, (0, 2, 1, 1), (1, 2, 1, 1)) == pytest.approx([3, 4])


def test_weight_decides_the_shares_of_a_crowded_core() -> None:
    assert ends(1, (0, 3, 1, 3), (0, 1, 1, 1)) == pytest.approx([4, 4])


def test_what_a_heavy_task_has_no_threads_for_goes_to_the_others() -> None:
    # Of 2 cores the heavy one can use 1; the other, of 2 threads, has the second core: half its speed.
    assert ends(2, (0, 1, 1, 9), (0, 1, 2, 1)) == pytest.approx([1, 1.5])


def test_a_task_wider_than_its_host_goes_at_full_speed_on_all_of_it() -> None:
    assert ends(1, (0, 2, 4, 1)) == pytest.approx([2])


def test_endless_work_takes_its_share_until_it_is_stopped() -> None:
    clock, found = Clock(), []
    host = Host(clock, 1)
    load = host.start(math.inf, None, threads=0.5)
    host.start(1.0, lambda: found.append(clock.now))
    clock.at(0.75, host.stop, load)
    clock.run()
    # 2/3 of a core for 0.75 s, then a whole one.
    assert found == pytest.approx([1.25])


def test_shortened_work_ends_earlier() -> None:
    clock, found = Clock(), []
    host = Host(clock, 1)
    task = host.start(10.0, lambda: found.append(clock.now))
    clock.at(2.0, lambda: host.shorten(task, 7.0))
    clock.run()
    assert found == pytest.approx([3.0])


def test_a_turn_goes_to_whoever_has_waited_longest_and_tells_its_holder() -> None:
    clock, seen = Clock(), []
    turn = Turn(clock)
    turn.take(lambda: seen.append("a"))
    turn.listen(lambda: seen.append("wanted"))
    turn.take(lambda: seen.append("b"))
    turn.take(lambda: seen.append("c"))
    assert seen == ["a", "wanted", "wanted"] and turn.contended
    turn.give()
    turn.give()
    turn.give()
    assert seen == ["a", "wanted", "wanted", "b", "c"] and not turn.contended
