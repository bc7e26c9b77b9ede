"""Several holders share something for a while after each change of who asks."""

from __future__ import annotations

from support.clock import Clock
from triptych.base.least_service import RECENT_SECONDS, RecentHolders


def test_one_holder_alone_shares_with_nobody_however_often_it_asks():
    holders = RecentHolders(Clock())
    assert not holders.several
    for _ in range(3):
        holders.note("a")
        assert not holders.several


def test_a_second_one_shares_until_it_has_not_asked_for_a_while():
    clock = Clock()
    holders = RecentHolders(clock)
    holders.note("a")
    holders.note("b")
    assert holders.several
    holders.note("a")
    clock.now += RECENT_SECONDS / 2
    holders.note("a")
    assert holders.several
    clock.now += RECENT_SECONDS / 2
    assert not holders.several
