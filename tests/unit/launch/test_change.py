"""Which workers start and which are drained."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.apps.launch.scaling import PoolChange, PoolWorkers, plan_change

NAMES = ("encoder-0", "encoder-1", "encoder-2", "encoder-3")


def _pool(running: str = "", draining: str = "") -> PoolWorkers:
    return PoolWorkers(NAMES, [f"encoder-{n}" for n in running], [f"encoder-{n}" for n in draining])


def _change(start: str = "", drain: str = "") -> PoolChange:
    return PoolChange(tuple(f"encoder-{n}" for n in start), tuple(f"encoder-{n}" for n in drain))


@pytest.mark.parametrize(
    ("pool", "wanted", "change"),
    [
        (_pool(), 0, _change()),
        (_pool(), 2, _change(start="01")),
        (_pool("0"), 4, _change(start="123")),
        (_pool("012"), 3, _change()),
        (_pool("012"), 1, _change(drain="21")),
        (_pool("012"), 0, _change(drain="210")),
        (_pool("12"), 3, _change(start="0")),
        (_pool("120"), 2, _change(drain="0")),
        (_pool("0", draining="1"), 2, _change(start="2")),
        (_pool("0", draining="123"), 3, _change()),
        (_pool("0", draining="12"), 1, _change()),
        (_pool("0123"), 9, _change()),
        (_pool("01"), -3, _change(drain="10")),
    ],
)
def test_free_names_start_and_the_newest_are_drained(pool, wanted, change):
    assert plan_change(pool, wanted) == change


@settings(deadline=None)
@given(wanted=st.lists(st.integers(0, 5), max_size=12), ended=st.lists(st.booleans(), min_size=12))
def test_a_pool_has_what_is_wanted_or_waits_for_a_drain_and_never_turns_both_ways(wanted, ended):
    running: list[str] = []
    draining: list[str] = []
    for number, all_ended in zip(wanted, ended, strict=False):
        change = plan_change(PoolWorkers(NAMES, running, draining), number)
        assert not (change.start and change.drain)
        assert not set(change.start) & {*running, *draining}
        assert list(change.drain) == running[::-1][: len(change.drain)]
        assert not change.start or number >= len(running) + len(change.start)
        held_back = len(draining)
        running = [name for name in (*running, *change.start) if name not in change.drain]
        assert len(running) == min(number, len(NAMES)) or len(running) == len(NAMES) - held_back < number
        draining = [] if all_ended else [*draining, *change.drain]
        assert len(running) + len(draining) <= len(NAMES)
