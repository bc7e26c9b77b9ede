"""Lines of a step of long work: when they come and what they say."""

from __future__ import annotations

import logging

import pytest

from support.clock import Clock
from triptych.base import progress
from triptych.base.progress import BYTES, Progress, duration, each, lines_on_stderr


class Log:
    """The lines of steps under a clock that a test moves."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.clock = Clock(1000.0)
        self._caplog = caplog
        caplog.set_level(logging.INFO, "progress")

    @property
    def lines(self) -> list[str]:
        return [record.message for record in self._caplog.records if record.name == "progress"]

    def step(self, label: str = "loading weights", total: float | None = None, unit: str = "") -> Progress:
        return Progress(label, total, unit, self.clock)


@pytest.fixture
def log(caplog) -> Log:
    return Log(caplog)


def test_a_step_has_a_line_every_five_seconds_and_at_its_ends(log):
    with log.step(total=600) as running:
        for _ in range(600):
            log.clock.now += 0.1
            running.advance()
    assert log.lines[0] == "loading weights: 0 %, 0 of 600"
    assert log.lines[1].startswith("loading weights: 8 %, 5")
    assert log.lines[-1] == "loading weights: 100 %, 600 of 600, in 1 min"
    assert 12 <= len(log.lines) <= 14


def test_a_short_step_has_one_line(log):
    with log.step(total=3) as running:
        log.clock.now += 0.9
        running.advance(3)
    assert log.lines == ["loading weights: 0 %, 0 of 3"]


def test_a_step_that_fails_never_says_that_all_was_done(log):
    with pytest.raises(KeyboardInterrupt), log.step(total=10) as running:
        log.clock.now += 3
        running.advance(4)
        raise KeyboardInterrupt
    assert log.lines[-1] == "loading weights: 40 %, 4 of 10, given up after 3 s"


def test_the_end_of_a_step_says_that_all_was_done_whatever_was_counted(log):
    with log.step(total=3):
        log.clock.now += 2
    assert log.lines[-1] == "loading weights: 100 %, 3 of 3, in 2 s"


def test_what_is_left_follows_from_the_pace_unless_the_work_knows_better(log):
    running = log.step(total=4, unit="windows")
    log.clock.now += 20
    running.advance(note="2 in flight")
    assert log.lines[-1] == "loading weights: 25 %, 1 of 4 windows, 2 in flight, about 1 min left"
    log.clock.now += 20
    running.advance(left=7.0)
    assert log.lines[-1] == "loading weights: 50 %, 2 of 4 windows, 2 in flight, about 7 s left"


def test_a_total_may_become_known_later(log):
    running = log.step("search", unit="searches")
    log.clock.now += 6
    running.advance()
    log.clock.now += 6
    running.advance(total=8)
    assert log.lines == [
        "search",
        "search: 1 searches, for 6 s",
        "search: 25 %, 2 of 8 searches, about 36 s left",
    ]


def test_bytes_are_shown_as_sizes(log):
    log.step(total=14 << 30, unit=BYTES)
    assert log.lines == ["loading weights: 0 %, 0 B of 14.0 GiB"]


def test_nothing_to_do_is_all_done(log):
    log.step(total=0)
    assert log.lines == ["loading weights: 100 %, 0 of 0"]


def test_two_steps_at_once_have_lines_of_their_own(log):
    outer, inner = log.step("all windows", 2), log.step("window", 10)
    log.clock.now += 6
    inner.advance(5)
    outer.advance()
    assert [line.split(",")[0] for line in log.lines[2:]] == ["window: 50 %", "all windows: 50 %"]


def test_each_of_a_sequence_is_given_once_and_counted_when_it_is_done(log, monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    given = each("graphs", [3, 1, 2], "graphs")
    assert next(given) == 3
    assert log.lines == ["graphs: 0 %, 0 of 3 graphs"]
    assert list(given) == [1, 2]
    assert [line.split(" graphs")[0] for line in log.lines[1:4]] == [
        f"graphs: {share} %, {done} of 3" for share, done in ((33, 1), (66, 2), (100, 3))
    ]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (-3, "0 s"), (59.4, "59 s"), (60, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_a_time_is_in_the_units_of_its_size(seconds, expected):
    assert duration(seconds) == expected


def test_a_command_has_its_lines_on_stderr_and_only_within_the_with(capsys):
    for _ in range(2):
        with lines_on_stderr():
            Progress("simulating")
        Progress("later")
    assert capsys.readouterr() == ("", "simulating\nsimulating\n")
