"""Numbers and names as the terminal shows them."""

from __future__ import annotations

import pytest

from triptych.apps.cli.top import words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (59.9, "59.9s"), (60, "1m00s"), (3599, "59m59s"), (3660, "1h01m"), (90000, "1d01h")],
)
def test_a_time_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0.031, "31ms"), (1.5, "1.50s"), (None, "-")])
def test_a_latency_is_in_milliseconds_below_a_second(value: float | None, text: str) -> None:
    assert words.latency(value) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(12, "12 B"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")]
)
def test_a_size_has_its_unit(nbytes: int, text: str) -> None:
    assert words.size(nbytes) == text


@pytest.mark.parametrize(("value", "text"), [(3.0, "3"), (3.14, "3.1"), (271.9, "272"), (None, "-")])
def test_a_number_has_few_digits(value: float | None, text: str) -> None:
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.5, "██░░ 50%"), (7.0, "████ 700%"), (-1.0, "░░░░ -100%"), (None, "-")]
)
def test_a_bar_never_leaves_its_width(share: float | None, text: str) -> None:
    assert words.bar(share, 4) == text


def test_a_sparkline_is_by_its_largest_value() -> None:
    assert words.sparkline([0, 4, 8]) == "▁▅█"
    assert words.sparkline([0, 0]) == "▁▁"
    assert words.sparkline([]) == ""


def test_no_control_character_of_a_workers_name_reaches_the_terminal() -> None:
    assert words.plain("a\x1b[2Jb\nc\u202ed") == "a?[2Jb?c?d"
