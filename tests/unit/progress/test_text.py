"""Steps in words: one line, whatever their texts hold."""

from __future__ import annotations

import pytest

from triptych.base.progress.progress import BYTES, StepState
from triptych.base.progress.tasks import amount, duration, line


def state(**values: object) -> StepState:
    return StepState("1", "loading weights", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (-3, "0 s"), (59.4, "59 s"), (60, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_a_time_is_in_the_units_of_its_size(seconds, expected):
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"done": 3, "total": 8, "unit": "layers"}, "3 of 8 layers"),
        ({"done": 3 << 30, "total": 14 << 30, "unit": BYTES}, "3.0 GiB of 14.0 GiB"),
        ({"done": 512, "unit": BYTES}, "512 B"),
        ({}, ""),
        ({"done": 4, "unit": "windows"}, "4 windows"),
    ],
)
def test_an_amount_is_in_its_unit_and_of_the_total_where_that_is_known(values, expected):
    assert amount(state(**values)) == expected


def test_a_line_has_share_amount_note_and_time():
    text = line(state(done=1, total=4, unit="windows", note="2 in flight"), 5.0, 61.0)
    assert text == "loading weights: 25 %, 1 of 4 windows, 2 in flight, about 1 min 1 s left"
