"""Token budgets: doubled up to the largest, or as the user gives them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.base.errors import ConfigError
from triptych.encoder_worker.graphs.packing import parse_budgets, smallest_fitting, token_budgets


@pytest.mark.parametrize(
    ("least", "most", "multiple", "budgets"),
    [
        (256, 4096, 1, (256, 512, 1024, 2048, 4096)),
        (100, 350, 1, (100, 200, 350)),
        (100, 100, 1, (100,)),
        (100, 101, 1, (100, 101)),
        (64, 16, 1, (64,)),
        (576, 5000, 576, (576, 1152, 2304, 4608)),
        (576, 100, 576, (576,)),
    ],
)
def test_budgets_double_from_the_least_and_end_with_the_most(
    least: int, most: int, multiple: int, budgets: tuple[int, ...]
) -> None:
    assert token_budgets(least, most, multiple) == budgets


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 50), st.integers(1, 8), st.integers(1, 10_000))
def test_budgets_ascend_by_at_most_a_factor_of_two_and_are_multiples(
    multiple: int, items: int, most: int
) -> None:
    budgets = token_budgets(multiple * items, most, multiple)
    assert budgets[0] == multiple * items
    assert all(one < other <= 2 * one for one, other in zip(budgets, budgets[1:], strict=False))
    assert all(budget % multiple == 0 for budget in budgets)
    assert budgets[-1] == budgets[0] or most - multiple < budgets[-1] <= most


def test_given_budgets_are_sorted_and_taken_once() -> None:
    assert parse_budgets("512,256, 512") == (256, 512)
    assert parse_budgets("1152,576", 576) == (576, 1152)


@pytest.mark.parametrize(
    ("text", "multiple", "message"),
    [
        ("256,many", 1, "--encoder-graph-budgets 256,many: give numbers of output rows"),
        ("0", 1, "--encoder-graph-budgets 0: 0 is below 1"),
        ("-576", 576, "-576 is below 1"),
        ("576,600", 576, "600 is no multiple of 576, the rows of one item of this model: give .*576,1152"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_with_the_flag(text: str, multiple: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_budgets(text, multiple)


def test_the_smallest_budget_with_room_is_taken() -> None:
    budgets = (100, 200, 350)
    assert [smallest_fitting(budgets, rows) for rows in (1, 100, 101, 350)] == [100, 100, 200, 350]
    assert smallest_fitting(budgets, 351) is None
