"""The terminal view: its loop, its keys, its numbers."""

from __future__ import annotations

import io
import os
import pty
import termios
from collections.abc import Iterator
from typing import TextIO

import msgspec
import pytest
from rich.console import Console

from support.fakes.live_view import EXAMPLE, CountingView
from triptych.apps.cli.top import tables
from triptych.apps.cli.top.screen import end_keys, watch
from triptych.base.errors import NotFound, RequestError, Unauthorized, Unavailable, printable
from triptych.proxy.live.objects import ClusterSnapshot

SEEN = msgspec.convert(EXAMPLE["snapshot"], ClusterSnapshot)


def followed(*replies: ClusterSnapshot | RequestError) -> tuple[str, type[BaseException]]:
    """What stands on the terminal after these replies, and how the loop has ended."""
    left: Iterator[ClusterSnapshot | RequestError] = iter(replies)
    output = io.StringIO()

    def read() -> ClusterSnapshot:
        reply = next(left, None)
        if reply is None:
            raise KeyboardInterrupt
        if isinstance(reply, RequestError):
            raise reply
        return reply

    console = Console(file=output, width=80, height=40, force_terminal=True, color_system=None)
    with pytest.raises((RequestError, KeyboardInterrupt)) as ended:
        watch(read, console, pause=lambda seconds: False)
    return output.getvalue(), ended.type


def test_a_proxy_that_does_not_answer_for_a_while_is_waited_for() -> None:
    text, ended = followed(SEEN, Unavailable("no server answers at x"), SEEN)
    assert ended is KeyboardInterrupt
    assert "no server answers at x; trying again" in text


@pytest.mark.parametrize("error", [Unauthorized("no key"), NotFound("no page")])
def test_an_error_that_stays_ends_it(error: RequestError) -> None:
    assert followed(SEEN, error)[1] is type(error)


def test_a_first_look_without_an_answer_ends_it() -> None:
    assert followed(Unavailable("no server answers")) == ("", Unavailable)


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (59.9, "59.9s"), (60, "1m00s"), (3599, "59m59s"), (3660, "1h01m"), (90000, "1d01h")],
)
def test_a_time_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(12, "12 B"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")]
)
def test_a_size_has_its_unit(nbytes: int, text: str) -> None:
    assert tables.size(nbytes) == text


def test_no_control_character_of_a_workers_name_reaches_the_terminal() -> None:
    assert printable("a\x1b[2Jb\nc\u202ed") == "a?[2Jb?c?d"
