"""Bars on a terminal: below the cursor, gone with their step, out of the way of what else is printed."""

from __future__ import annotations

import io
import re
import threading
from dataclasses import replace

import pytest

from triptych.base.progress.progress import Progress, StepState
from triptych.base.progress.renderers import TerminalRenderer
from triptych.base.progress.screen import CLEAR, can_draw


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
