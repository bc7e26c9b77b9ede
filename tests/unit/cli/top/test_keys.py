"""Keys of the terminal view: `q` ends it, other keys do not, and the terminal is as before afterwards."""

from __future__ import annotations

import io
import os
import pty
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest
from rich.console import Console

from support.fakes.live_view import CountingView
from triptych.apps.cli.top.keys import end_keys
from triptych.apps.cli.top.screen import watch


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """A keyboard's end, and the program's."""
    keyboard, program = pty.openpty()
    with os.fdopen(program) as stdin:
        yield keyboard, stdin
    os.close(keyboard)


def test_q_ends_the_view_at_once_and_leaves_the_terminal_as_it_was(terminal: tuple[int, TextIO]) -> None:
    keyboard, stdin = terminal
    before = termios.tcgetattr(stdin.fileno())
    view, screen = CountingView(), Console(file=io.StringIO(), width=80, height=40, force_terminal=True)
    with end_keys(stdin) as pause:
        os.write(keyboard, b"q")
        watch(view.snapshot, screen, lambda seconds: pause(60.0))
    assert view.snapshots == 1
    assert termios.tcgetattr(stdin.fileno()) == before


def test_other_keys_do_not_end_it(terminal: tuple[int, TextIO]) -> None:
    keyboard, stdin = terminal
    with end_keys(stdin) as pause:
        os.write(keyboard, b"x\n")
        assert pause(0.05) is False
        os.write(keyboard, b"Q")
        assert pause(60.0) is True


def test_an_input_that_is_no_terminal_is_not_read() -> None:
    stdin = io.StringIO("q")
    with end_keys(stdin) as pause:
        assert pause(0.0) is False
    assert stdin.read() == "q"
