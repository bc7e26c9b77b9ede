"""Bars on a terminal: below the cursor, gone with their step, out of the way of what else is printed."""

from __future__ import annotations

import io
import threading

import pytest

from triptych.progress.progress import Progress
from triptych.progress.screen import CLEAR, can_draw, frame, style_of
from triptych.progress.step import StepState
from triptych.progress.terminal import TerminalRenderer


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise OSError("the terminal is gone")


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def renderer(terminal):
    found = TerminalRenderer(terminal)
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


def test_a_file_and_a_closed_stream_do_not_draw(terminal):
    assert not can_draw(io.StringIO(), {"TERM": "xterm"})
    terminal.close()
    closed = io.StringIO()
    closed.close()
    assert not can_draw(closed, {"TERM": "xterm"})


def test_no_color_takes_the_colours_and_leaves_the_bar(terminal):
    assert style_of(terminal, {"NO_COLOR": "1"}).colour is False
    assert style_of(terminal, {"NO_COLOR": ""}).colour is True
    assert style_of(terminal, {}).unicode is True


def test_a_stream_without_utf_8_has_no_other_characters():
    class Latin(Terminal):
        encoding = "iso-8859-1"  # type: ignore[assignment]

    assert style_of(Latin(), {}).unicode is False


def test_a_frame_leaves_the_cursor_where_it_was():
    assert frame(["one", "two"]) == f"{CLEAR}\none\ntwo\r\x1b[2A"
    assert frame([]) == CLEAR


def test_a_frame_has_a_bar_for_each_running_step(terminal, renderer):
    outer, inner = (Progress(label, renderer).start(4) for label in ("all windows", "window"))
    outer.advance()
    renderer.draw()
    drawn = terminal.getvalue()
    assert "all windows" in drawn and drawn.index("all windows") < drawn.index("\nwindow")
    inner.finish()
    outer.finish()
    assert terminal.getvalue().endswith(CLEAR)


def test_a_step_that_ends_before_the_first_frame_is_never_seen(terminal, renderer):
    with Progress("short", renderer).start(1):
        pass
    assert terminal.getvalue() == ""


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


def test_a_kept_step_stays_when_it_has_ended_until_all_are_closed(terminal, renderer):
    renderer.keep(StepState("pd-0", "pd-0: ready", ended=True))
    renderer.draw()
    assert "pd-0: ready" in terminal.getvalue()
    renderer.close()
    assert terminal.getvalue().endswith(CLEAR)


def test_a_terminal_that_is_gone_ends_no_work():
    renderer = TerminalRenderer(Gone())
    with Progress("long", renderer).start(2) as running:
        renderer.draw()
        running.advance()
        renderer.draw()
    renderer.close()


def test_more_steps_than_lines_are_cut_to_the_terminal(terminal, renderer):
    for index in range(100):
        renderer.keep(StepState(str(index), f"step {index}"))
    renderer.draw()
    assert terminal.getvalue().rsplit(CLEAR, 1)[1].count("\n") <= 22
