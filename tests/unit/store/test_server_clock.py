from __future__ import annotations

import random

import pytest

from triptych.store.scripts import SLACK_SECONDS, ServerClock


def test_a_clock_that_goes_on_evenly_never_jumps() -> None:
    """Answers may be slow, the clocks may start anywhere and drift by what crystals do."""
    rng = random.Random(4)
    clock, now = ServerClock(), 0.0
    for _ in range(2000):
        now += rng.choice((0.01, 0.5, 60.0))
        reply = rng.choice((0.0, 0.001, 0.3, 4.9))
        clock.answered(1.7e9 + (now + reply * rng.random()) * (1 + 20e-6), now, now + reply)
        now += reply
    assert clock.jumps == 0


@pytest.mark.parametrize("by", [-3600.0, -2 * SLACK_SECONDS, 2 * SLACK_SECONDS, 86400.0])
def test_every_jump_counts_once(by: float) -> None:
    clock = ServerClock()
    for at in range(10):
        clock.answered(1000.0 + at + (by if at >= 5 else 0.0), at, at + 0.001)
        assert clock.jumps == (at >= 5)


def test_a_slow_reply_widens_the_bounds_and_hides_no_jump() -> None:
    clock = ServerClock()
    clock.answered(1000.0, 0.0, 0.01)
    clock.answered(1004.0, 1.0, 6.0)
    assert clock.jumps == 0
    clock.answered(1107.0, 7.0, 7.01)
    assert clock.jumps == 1


def test_the_first_answer_is_no_jump() -> None:
    clock = ServerClock()
    clock.answered(1e9, 0.0, 0.0)
    assert clock.jumps == 0
