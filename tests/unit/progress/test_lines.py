"""Lines where there is no terminal: one as a step begins, a few as it goes on, one at its end."""

from __future__ import annotations

import pytest

from triptych.base.progress.progress import Progress
from triptych.base.progress.renderers import LineRenderer, due


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Log:
    """The lines of a renderer under a clock that a test moves."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.lines: list[str] = []
        self.renderer = LineRenderer(self.lines.append, self.clock)

    def step(self, label: str = "loading weights") -> Progress:
        return Progress(label, self.renderer, self.clock)

    def run(self, seconds: int, total: int | None, unit: str = "") -> list[str]:
        """A step that advances ten times a second, by one."""
        with self.step().start(total, unit) as running:
            for _ in range(seconds * 10):
                self.clock.now += 0.1
                running.advance()
        return self.lines


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.mark.parametrize(
    ("seconds", "shares", "expected"),
    [(4.9, 1.0, False), (5.0, 0.1, True), (29.9, 0.09, False), (30.0, 0.0, True), (-3600.0, 0.5, False)],
)
def test_a_line_follows_after_a_tenth_and_some_seconds_or_after_many_seconds(seconds, shares, expected):
    assert due(seconds, shares) is expected


def test_a_step_of_two_minutes_has_a_line_for_every_tenth(log):
    lines = log.run(120, 1200)
    shares = [int(line.split(": ")[1].split(" %")[0]) for line in lines]
    assert shares[0] == 0 and shares[-1] == 100
    assert 10 <= len(lines) <= 12
    assert lines[5] == "loading weights: 50 %, 603 of 1200, about 1 min left"


def test_a_step_that_fails_never_says_that_all_was_done(log):
    with pytest.raises(OSError), log.step().start(10) as running:
        log.clock.now += 3
        running.advance(4)
        raise OSError
    assert log.lines[-1] == "loading weights: 40 %, 4 of 10, given up after 3 s"


def test_two_steps_at_once_have_lines_of_their_own(log):
    outer, inner = log.step("all windows").start(2), log.step("window").start(10)
    log.clock.now += 6
    inner.advance(5)
    outer.advance()
    assert [line.split(",")[0] for line in log.lines[2:]] == ["window: 50 %", "all windows: 50 %"]
