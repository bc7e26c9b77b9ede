"""The wait before a restart."""

from __future__ import annotations

from triptych.apps.launch.children import backoff


def test_restarts_wait_longer_each_time_up_to_a_bound():
    assert [backoff(n) for n in range(7)] == [0, 0.5, 1, 2, 4, 8, 10]
