"""Steps in words: one line, whatever their texts hold, never wider than the terminal."""

from __future__ import annotations

import re

import pytest

from triptych.progress.step import BYTES, StepState
from triptych.progress.text import TerminalStyle, amount, bar, duration, label_width, line, remaining

COLOURS = re.compile("\x1b\\[[0-9;]*m")


def state(**values: object) -> StepState:
    return StepState("1", "loading weights", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (-3, "0 s"), (59.4, "59 s"), (60, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_a_time_is_in_the_units_of_its_size(seconds, expected):
    assert duration(seconds) == expected


def test_of_an_unknown_time_nothing_is_said():
    assert remaining(None) == ""


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


@pytest.mark.parametrize("columns", [1, 10, 40, 79, 110, 300])
@pytest.mark.parametrize("total", [None, 0, 100])
@pytest.mark.parametrize("style", [TerminalStyle(), TerminalStyle(unicode=False, colour=False)])
def test_a_bar_is_one_line_that_is_never_wider_than_the_terminal(columns, total, style):
    shown = bar(state(done=7, total=total, note="x" * 200), 3.0, 9.0, columns, style)
    plain = COLOURS.sub("", shown)
    assert len(plain) <= columns
    assert "\n" not in plain


def test_control_characters_of_a_label_or_a_note_do_not_reach_the_terminal():
    hostile = StepState("1", "evil\x1b[2J\n", note="\x07\x9b1m")
    shown = bar(hostile, 0.0, None, 100, TerminalStyle(colour=False))
    assert shown.isprintable()


def test_without_colour_a_bar_has_no_escape_sequence():
    assert "\x1b" not in bar(state(done=1, total=2), 0.0, 1.0, 100, TerminalStyle(colour=False))


def test_in_ascii_a_bar_has_ascii_characters_alone():
    shown = bar(StepState("1", "é" * 50, done=1, total=2), 0.0, 1.0, 120, TerminalStyle(unicode=False))
    assert shown.isascii()
    assert "############------------" in COLOURS.sub("", shown)


def test_more_than_all_fills_the_bar_and_not_more():
    shown = bar(state(done=20, total=2), 0.0, 0.0, 100, TerminalStyle(colour=False))
    assert shown.count("━") == 24 and "100 %" in shown


def test_where_there_is_no_room_the_note_goes_first_and_then_the_bar():
    step = state(done=1, total=2, note="3 in flight")
    wide, narrow, narrower = (
        bar(step, 0.0, 9.0, columns, TerminalStyle(colour=False)) for columns in (90, 75, 50)
    )
    assert "━" in wide and wide.endswith("3 in flight")
    assert "━" in narrow and "flight" not in narrow and "about 9 s left" in narrow
    assert "━" not in narrower and "about 9 s left" in narrower


def test_labels_of_one_frame_have_one_width():
    assert label_width(["short", "longer label"], 80) == len("longer label")
    assert label_width(["x" * 200], 80) < 40 < label_width(["x" * 200], 120) < 60
    assert label_width([], 80) == 0


def test_an_ended_step_has_no_time_left():
    assert "left" not in bar(state(done=2, total=2, ended=True), 1.0, 0.0, 100, TerminalStyle())
