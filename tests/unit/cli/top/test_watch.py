"""`triptych top`: what it polls and what it draws."""

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
from triptych.apps.cli.top.screen import Trends, end_keys, screen, watch
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


def drawn(seen: ClusterSnapshot, width: int, height: int = 0, problem: str = "") -> list[str]:
    trends = Trends()
    for _ in range(100):
        trends.add(seen)
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(screen(seen, trends, width, height, problem))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 100, 160, 300])
def test_everything_of_a_snapshot_is_on_the_screen(width: int) -> None:
    text = "\n".join(drawn(SEEN, width))
    for word in (
        *(
            "triptych-images",
            "9/256",
            "4 queued",
            "205 MiB",
            "11.3/s",
            "212/s",
            "37%",
            "93%",
            "310ms",
            "1.90s",
        ),
        *("179 MiB of 512 MiB", "12 evictions", "1 live, 2 desired (flow)", "encoder-0", "lost"),
        *(
            "31%",
            "97%",
            "704 MiB",
            "71%",
            "16.0 GiB",
            "shm 7",
            "9c01be77",
            "decode",
            "1/2",
            "encoder worker encoder-1 is lost",
            "3 times",
        ),
    ):
        assert word in text, word


@pytest.mark.parametrize("width", [40, 80, 160, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, drawn(SEEN, width))) <= width


@pytest.mark.parametrize(("width", "height"), [(80, 40), (80, 60), (160, 30), (160, 60)])
def test_a_large_cluster_fits_the_terminals_height(width: int, height: int) -> None:
    many = msgspec.structs.replace(
        SEEN,
        encoders=SEEN.encoders * 50,
        pd_workers=SEEN.pd_workers * 50,
        requests=SEEN.requests * 20,
        failures=SEEN.failures * 10,
    )
    lines = drawn(many, width, height)
    assert len(lines) <= height
    text = "\n".join(lines)
    assert "Encoder workers: 100" in text and "PD workers: 100" in text and "Requests in flight" in text


def test_a_problem_stands_first() -> None:
    assert drawn(SEEN, 80, problem="no server answers at x")[0].startswith("no server answers")


def test_names_are_shown_as_they_are_and_cannot_steer_the_terminal() -> None:
    strange = msgspec.structs.replace(SEEN.encoders[0], name="[red]\x1b]0;x\x07", state="[/]")
    seen = msgspec.structs.replace(SEEN, encoders=[strange], models=["[bold]m\x1b[2J"])
    text = "\n".join(drawn(seen, 160))
    assert "\x1b" not in text and "\x07" not in text
    assert "[red]?]0;x?" in text and "[bold]m?[2J" in text
