"""The memory of several servers."""

from __future__ import annotations

import pytest

from triptych.store.results import StoreMemory, combined

GIB = 1 << 30


def memory(max_bytes: int, policy: str = "volatile-lru") -> StoreMemory:
    return StoreMemory(max_bytes, max_bytes // 4, policy)


def test_equal_servers_have_the_sum() -> None:
    assert combined([(memory(GIB), 0.25)] * 4) == StoreMemory(4 * GIB, GIB, "volatile-lru")


def test_the_server_that_is_full_first_bounds_the_budget() -> None:
    assert combined([(memory(10 * GIB), 0.5), (memory(GIB), 0.5)]).max_bytes == 2 * GIB
    assert combined([(memory(10 * GIB), 0.9), (memory(GIB), 0.1)]).max_bytes == pytest.approx(10 * GIB)


def test_a_server_without_a_limit_leaves_the_store_without_one() -> None:
    assert combined([(memory(GIB), 0.5), (memory(0), 0.5)]).max_bytes == 0
    assert combined([]).max_bytes == 0


def test_one_wrong_policy_is_the_policy_of_all() -> None:
    assert combined([(memory(GIB), 0.5), (memory(GIB, "noeviction"), 0.5)]).policy == "noeviction"
