"""Bars on a terminal: below the cursor, gone with their step, out of the way of what else is printed."""

from __future__ import annotations

import io
import re
import threading
from dataclasses import replace

import pytest

from triptych.base.progress.progress import Progress, StepState
from triptych.base.progress.renderers import TerminalRenderer
from triptych.base.progress.screen import CLEAR, can_draw, frame


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


def test_a_file_and_a_closed_stream_do_not_draw(terminal):
    assert not can_draw(io.StringIO(), {"TERM": "xterm"})
    terminal.close()
    closed = io.StringIO()
    closed.close()
    assert not can_draw(closed, {"TERM": "xterm"})


def test_a_frame_leaves_the_cursor_where_it_was():
    assert frame(["one", "two"]) == f"{CLEAR}\none\ntwo\r\x1b[2A"
    assert frame([]) == CLEAR


def test_a_bar_has_label_share_amount_time_and_note():
    text = plain(drawn(loading(note="3 in flight"), columns=120))
    assert re.fullmatch(
        r"loading weights ━{12}╺━{11}  50 %  2 of 4 layers  about 3 s left 3 in flight ?", text
    )


def test_no_color_takes_the_colours_and_leaves_the_bar():
    assert "\x1b[36m" in drawn(loading())
    assert "m" not in "".join(re.findall("\x1b\\[[0-9;]*([a-zA-Z])", drawn(loading(), no_color="1")))
    assert "━━━  " in plain(drawn(loading(), no_color="1"))


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


def test_where_there_is_no_space_the_note_and_the_bar_give_theirs_first():
    state = loading(note="three in flight")
    wide, narrow, narrower = (plain(drawn(state, columns=columns)) for columns in (110, 80, 56))
    assert len(re.findall("[━╺]", wide)) == 24 and "three in flight" in wide
    assert 0 < narrow.count("━") < 24 and "three in flight" not in narrow
    assert "━" not in narrower
    assert all("loading weights" in text and "about 3 s left" in text for text in (wide, narrow, narrower))


def test_more_than_all_fills_the_bar_and_not_more():
    assert plain(drawn(loading(done=20), columns=120)).count("━") == 24
    assert "100 %" in plain(drawn(loading(done=20)))


def test_a_long_label_leaves_space_for_the_rest():
    assert "about 3 s left" in plain(drawn(loading(label="x" * 200), columns=80))


def test_time_left_is_the_work_s_own_word_where_it_gives_one():
    assert "about 1 min 40 s left" in plain(drawn(loading(left=100.4)))


def test_an_ended_step_has_no_time_left():
    assert "left" not in plain(drawn(loading(done=4, ended=True)))


def test_a_step_with_another_label_begins_a_new_estimate_in_the_same_row(terminal, renderer):
    renderer.keep(StepState("pd-0", "pd-0: loading weights", 5, 10))
    renderer.keep(StepState("encoder-0", "encoder-0: starting"))
    renderer.keep(StepState("pd-0", "pd-0: warming up"))
    renderer.draw()
    first, second = plain(terminal.getvalue().rpartition(CLEAR)[2]).splitlines()
    assert "pd-0: warming up" in first and "%" not in first and "encoder-0" in second


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
    assert terminal.getvalue().rsplit(CLEAR, 1)[1].count("\n") == 22
