"""Numbers and names as the terminal shows them."""

from __future__ import annotations

import pytest

from triptych.apps.cli.top import tables


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (59.9, "59.9s"), (60, "1m00s"), (3599, "59m59s"), (3660, "1h01m"), (90000, "1d01h")],
)
def test_a_time_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(12, "12 B"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")]
)
def test_a_size_has_its_unit(nbytes: int, text: str) -> None:
    assert tables.size(nbytes) == text


def test_no_control_character_of_a_workers_name_reaches_the_terminal() -> None:
    assert tables.plain("a\x1b[2Jb\nc\u202ed") == "a?[2Jb?c?d"
