"""How often the proxy looks at the registry."""

from __future__ import annotations

from triptych.proxy.pool import POLL_SECONDS, poll_interval


def test_an_empty_pool_is_looked_at_more_often_than_a_complete_cluster() -> None:
    assert poll_interval(complete=False) < poll_interval(complete=True) == POLL_SECONDS
