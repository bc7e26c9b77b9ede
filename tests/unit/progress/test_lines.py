"""Progress in lines and on a terminal."""

from __future__ import annotations

import io
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from support.clock import Clock
from triptych.base.progress.progress import BYTES, Progress, StepState
from triptych.base.progress.renderers import (
    MAX_BYTES,
    LauncherRenderer,
    LineRenderer,
    TerminalRenderer,
    decode,
    due,
    encode,
)
from triptych.base.progress.screen import CLEAR, can_draw
from triptych.base.progress.tasks import amount, duration, line


class Log:
    """The lines of a renderer under a clock that a test moves."""

    def __init__(self) -> None:
        self.clock = Clock(1000.0)
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


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


class Latin(Terminal):
    encoding = "iso-8859-1"  # type: ignore[assignment]


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise OSError("the terminal is gone")


COLOURS = re.compile("\x1b\\[[0-9;]*m")


def drawn(state: StepState, terminal: Terminal | None = None, columns: int = 100, no_color: str = "") -> str:
    """A frame of a step that has come to this state at an even pace, in five parts of half a second."""
    now = [0.0]
    terminal = terminal or Terminal()
    environ = {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "24", "NO_COLOR": no_color}
    renderer = TerminalRenderer(terminal, lambda: now[0], environ)
    with renderer.hidden():  # no frame comes by itself
        for part in range(1, 6):
            renderer.keep(replace(state, done=state.done * part / 5, ended=state.ended and part == 5))
            now[0] += 0.5
        renderer.draw()
        text = terminal.getvalue().rpartition(CLEAR)[2]
    renderer.close()
    return text


def plain(text: str) -> str:
    """A frame's lines without colours and without the cursor's way back."""
    return COLOURS.sub("", text).rpartition("\r")[0].lstrip("\n")


def loading(**values: object) -> StepState:
    return replace(StepState("1", "loading weights", 2, 4, "layers"), **values)


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def renderer(terminal):
    found = TerminalRenderer(terminal, environ={"TERM": "xterm", "COLUMNS": "80", "LINES": "24"})
    yield found
    found.close()


def drawing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "progress"]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": ""}, False), ({}, False)],
)
def test_a_terminal_draws_unless_it_is_dumb(terminal, environ, expected):
    assert can_draw(terminal, environ) is expected


def test_a_bar_has_label_share_amount_time_and_note():
    text = plain(drawn(loading(note="3 in flight"), columns=120))
    assert re.fullmatch(
        r"loading weights ━{12}╺━{11}  50 %  2 of 4 layers  about 3 s left 3 in flight ?", text
    )


def test_a_terminal_without_utf_8_has_ascii_bars_and_its_own_characters():
    text = plain(drawn(loading(label="größe ≥ 日本"), terminal=Latin()))
    assert "größe ? ??" in text and "------------" in text
    text.encode("iso-8859-1")


@pytest.mark.parametrize("columns", [1, 10, 40, 79, 110, 300])
@pytest.mark.parametrize("total", [None, 0, 100])
def test_a_step_is_one_line_that_is_never_wider_than_the_terminal(columns, total):
    lines = plain(drawn(loading(done=7, total=total, note="x" * 200), columns=columns)).splitlines()
    assert len(lines) == 1 and len(lines[0]) <= columns


def test_control_characters_of_a_label_a_unit_or_a_note_do_not_reach_the_terminal():
    text = plain(drawn(StepState("1", "evil\x1b[2J\n", 1, 2, "\x1b[1A", "\x07\x9b1m"), columns=150))
    assert text.isprintable() and "evil?[2J?" in text


def test_a_step_that_fails_leaves_nothing_on_the_terminal(terminal, renderer):
    with pytest.raises(KeyboardInterrupt), Progress("long", renderer).start(1):
        renderer.draw()
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith(CLEAR)


def test_what_is_printed_between_two_frames_begins_on_an_empty_terminal(terminal, renderer):
    with Progress("long", renderer).start(1):
        renderer.draw()
        with renderer.hidden():
            terminal.write("a sentence\n")
        assert terminal.getvalue().endswith(f"{CLEAR}a sentence\n")


def test_frames_come_by_themselves_and_their_thread_ends_with_the_last_step(terminal, renderer):
    drawn = threading.Event()
    write = terminal.write

    def noting(text: str) -> int:
        drawn.set()
        return write(text)

    terminal.write = noting
    running = Progress("long", renderer).start(1)
    assert drawn.wait(10)
    (thread,) = drawing_threads()
    running.finish()
    thread.join(10)
    assert not drawing_threads()


def test_a_terminal_that_is_gone_ends_no_work():
    renderer = TerminalRenderer(Gone())
    with Progress("long", renderer).start(2) as running:
        renderer.draw()
        running.advance()
        renderer.draw()
    renderer.close()
