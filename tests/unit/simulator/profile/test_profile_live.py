"""What windows of a running cluster say of costs. No cluster is started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.simulator.costs.costs import PDCosts
from triptych.simulator.profile.fit import TERMS, fit_costs
from triptych.simulator.profile.profile_live import (
    LiveWindow,
    colder,
    expected_steps,
    live_samples,
    own_core,
    step_ratio,
    take_busy,
)

COSTS = PDCosts(0.004, 5e-5, 1e-4, 1e-6, 0.0, 0.0, 0.0, take_request=1e-4)


def window(at_once: int, replies: int = 64, ratio: float = 1.0) -> LiveWindow:
    """Every request has 40 prompt tokens; messages hold `at_once` tokens; nothing is idle."""
    requests = 10 * at_once
    tokens = requests * replies
    messages = tokens / at_once
    made = LiveWindow(at_once, requests, messages, tokens, requests * 40, 0.0, 0.0, 0.0, 0.0, 0.0, queue=0.0)
    engine = ratio * expected_steps(made, COSTS)
    return replace(
        made,
        engine=engine,
        wall=engine + 3e-4 * messages + 4e-5 * tokens,
        proxy=1e-3 * requests + 2e-4 * messages + 3e-5 * tokens,
        client=2e-3 * requests + 1e-4 * messages + 1e-5 * tokens,
        queue=engine / messages / 2 + 0.002,
    )


#: Requests at once, and how much longer all steps took by then.
SLOWER = {2: 1.0, 4: 1.6, 8: 1.3}
TIMES = ("wall", "engine", "worker", "proxy", "client", "queue")
WINDOWS = [window(count) for count in (1, 2, 4, 8)] + [window(3, replies=8)]


def test_costs_come_back_from_the_windows_that_they_made() -> None:
    fits = {
        stage: fit_costs(samples, TERMS[stage])
        for stage, samples in live_samples(WINDOWS, COSTS, one_thread=True).items()
    }
    assert fits["tell"].costs == pytest.approx({"message": 3e-4, "message_token": 4e-5})
    assert fits["relay"].costs == pytest.approx({"request": 1e-3, "message": 2e-4, "token": 3e-5})
    assert fits["client"].costs == pytest.approx({"request": 2e-3, "message": 1e-4, "token": 1e-5})


def test_steps_that_took_longer_than_alone_make_all_their_costs_dearer() -> None:
    windows = [window(count, ratio=1.2) for count in (2, 4, 8)]
    assert step_ratio(windows, COSTS) == pytest.approx(1.2)
    dearer = colder(COSTS, 1.2)
    assert dearer.step == pytest.approx(0.0048) and dearer.take_request == COSTS.take_request
    assert step_ratio(windows, dearer) == pytest.approx(1.0)


def slowed(found: LiveWindow, factor: float) -> LiveWindow:
    """The same window while the machine takes `factor` times as long for all."""
    times = {name: factor * getattr(found, name) for name in TIMES}
    return replace(found, **times)


def test_a_window_of_a_slower_hour_is_brought_to_the_speed_of_the_costs() -> None:
    for count, slower in SLOWER.items():
        even = slowed(window(count), slower).at_speed_of_costs(slower)
        for name in TIMES:
            assert getattr(even, name) == pytest.approx(getattr(window(count), name)), name
        assert even.alone == slower


def test_steps_on_a_machine_that_has_become_slower_are_set_against_slower_steps_alone() -> None:
    windows = [
        slowed(window(count, ratio=1.2), slower).at_speed_of_costs(slower) for count, slower in SLOWER.items()
    ]
    assert step_ratio(windows, COSTS) == pytest.approx(1.2)


def test_where_others_share_a_steps_work_what_costs_leave_over_is_telling() -> None:
    many = [replace(one, engine=one.engine / 2) for one in WINDOWS]
    told = live_samples(many, COSTS, one_thread=False)["tell"]
    assert fit_costs(told, TERMS["tell"]).costs == pytest.approx({"message": 3e-4, "message_token": 4e-5})


def test_the_wait_on_the_way_in_is_what_half_a_step_does_not_explain() -> None:
    by_chance = replace(window(4), at_once=0)
    assert take_busy([*WINDOWS, by_chance], COSTS) == pytest.approx(0.002 - 1e-4)
    assert take_busy([replace(by_chance, queue=0.0)], COSTS) == 0.0


def test_a_core_of_its_own_is_judged_by_windows_with_as_many_at_once() -> None:
    pinned = [slowed(window(count), factor) for count, factor in ((2, 0.7), (4, 0.8), (8, 1.4))]
    assert own_core(pinned, WINDOWS) == pytest.approx(0.8)
    assert own_core([], WINDOWS) == 1.0
