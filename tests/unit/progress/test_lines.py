"""Lines where there is no terminal, and reports from a worker to its launcher."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from triptych.base.progress.progress import BYTES, Progress, StepState
from triptych.base.progress.renderers import MAX_BYTES, LauncherRenderer, LineRenderer, decode, due, encode
from triptych.base.progress.tasks import amount, duration, line


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


STATE = StepState("3", "loading weights", 5.0, 10.0, BYTES, "note", 2.5, ended=True, failed=False)
_HUGE = b'{"name": "a", "state": {"key": "1", "label": "x", "done": 1e999}}'


@pytest.fixture
def listener(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.setblocking(False)
        found.bind(str(tmp_path / "progress"))
        yield found


def test_a_state_comes_back_from_its_datagram():
    assert decode(encode("pd-0", STATE)) == ("pd-0", STATE)
    unknown = StepState("3", "compiling")
    assert decode(encode("pd-0", unknown)) == ("pd-0", unknown)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b"[" * 4000, _HUGE])
def test_what_is_no_datagram_of_a_state_is_none(data):
    assert decode(data) is None


def test_a_worker_reports_to_the_socket_of_its_launcher(listener, tmp_path):
    renderer = LauncherRenderer(tmp_path / "progress", "pd-0")
    renderer.show(STATE)
    renderer.ready()
    assert decode(listener.recv(MAX_BYTES)) == ("pd-0", STATE)
    found = decode(listener.recv(MAX_BYTES))
    assert found is not None and found[1].label == "ready" and found[1].ended
    renderer.close()


def test_a_launcher_that_does_not_read_holds_no_worker_up(listener, tmp_path):
    renderer = LauncherRenderer(tmp_path / "progress", "pd-0")
    for _ in range(5000):
        renderer.show(STATE)
    renderer.close()


def test_a_launcher_that_is_gone_ends_no_worker(listener, tmp_path):
    renderer = LauncherRenderer(tmp_path / "progress", "pd-0")
    listener.close()
    renderer.show(STATE)
    renderer.close()


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
