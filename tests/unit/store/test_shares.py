"""What one process knows of a server's memory, and when it looks again."""

from __future__ import annotations

import pytest

from triptych.store.shares import Memory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("used", "nbytes", "limit", "excess"),
    [
        (700, 100, 1000, 0),
        (700, 101, 1000, 1),
        (5000, 100, 1000, 4300),
        (5000, 100, 0, 0),
    ],
)
def test_bytes_are_too_many_above_the_mark_of_a_server_with_a_limit(used, nbytes, limit, excess):
    assert Memory(used, limit, at=0.0).excess(nbytes) == excess


def test_what_was_saved_and_deleted_since_counts() -> None:
    memory = Memory(700, 1000, at=0.0)
    memory.saved, memory.deleted = 300, 150
    assert memory.excess(0) == 50


@pytest.mark.parametrize(
    ("used", "saved", "seconds", "stale"),
    [
        (GIB // 2, 0, 100.0, False),
        (GIB, 0, 0.5, False),
        (GIB, 0, 1.5, True),
        (GIB // 2, GIB // 16, 0.0, True),
        (GIB // 2, GIB // 64, 0.0, False),
    ],
)
def test_memory_is_looked_at_again_where_it_matters(used, saved, seconds, stale):
    assert Memory(used, GIB, at=0.0, saved=saved).is_stale(seconds) is stale


def test_a_server_without_a_limit_is_not_asked_with_every_save() -> None:
    assert not Memory(GIB, 0, at=0.0, saved=GIB).is_stale(100.0)
