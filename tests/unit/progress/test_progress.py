"""Reports of a step, and which renderer a process has."""

from __future__ import annotations

import io
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from triptych.base.progress.progress import Progress, StepState, each, ready, shown_by, step
from triptych.base.progress.renderers import (
    VARIABLE,
    LauncherRenderer,
    LineRenderer,
    command_renderer,
    service_renderer,
)


class Recorder:
    """A renderer that keeps what it is shown."""

    interval = 1.0

    def __init__(self) -> None:
        self.states: list[StepState] = []
        self.is_ready = False

    def show(self, state: StepState) -> None:
        self.states.append(state)

    def ready(self) -> None:
        self.is_ready = True


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def test_a_step_is_shown_as_it_starts_and_as_it_ends(recorder):
    with Progress("work", recorder, lambda: 0.0).start(3, "layers") as running:
        running.advance()
    first, last = recorder.states
    assert (first.label, first.done, first.total, first.unit, first.ended) == ("work", 0, 3, "layers", False)
    assert (last.done, last.share, last.ended, last.failed) == (3, 1.0, True, False)
    assert first.key == last.key


def test_advances_are_shown_no_more_often_than_the_interval(recorder):
    now = 0.0
    running = Progress("work", recorder, lambda: now).start(1000)
    for _ in range(1000):
        now += 0.01
        running.advance()
    assert len(recorder.states) <= 1 + 10


def test_a_step_that_raises_has_failed_and_is_not_all_done(recorder):
    with pytest.raises(KeyboardInterrupt), Progress("work", recorder, lambda: 0.0).start(3):
        raise KeyboardInterrupt
    assert recorder.states[-1].failed and recorder.states[-1].ended
    assert recorder.states[-1].share == 0


def test_a_total_a_note_and_a_time_left_replace_those_before(recorder):
    running = Progress("work", recorder, lambda: 0.0).start()
    running.advance(2, total=8, note="3 in flight", left=12.0)
    running.finish(failed=True)
    last = recorder.states[-1]
    assert (last.done, last.total, last.note, last.left) == (2, 8, "3 in flight", 12.0)


def test_steps_go_to_the_renderer_of_the_process_as_long_as_that_is_set(recorder):
    with shown_by(recorder):
        with step("inside"):
            pass
        ready()
    with step("outside"):
        pass
    assert {state.label for state in recorder.states} == {"inside"}
    assert recorder.is_ready


def test_each_of_a_sequence_is_given_once_and_all_are_counted(recorder):
    with shown_by(recorder):
        assert list(each("graphs", [3, 1, 2], "graphs")) == [3, 1, 2]
    assert recorder.states[-1].done == 3 and recorder.states[-1].total == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Makes this process's stderr a terminal; called by the test, since pytest has one of its own for it."""

    def place() -> Terminal:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        return terminal

    return place


@pytest.fixture
def launcher(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "progress"))
        yield {VARIABLE: str(tmp_path / "progress"), "TERM": "xterm"}


def test_a_command_on_a_dumb_terminal_or_a_file_writes_lines_to_stderr(on_terminal, monkeypatch, capsys):
    on_terminal()
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(command_renderer(), LineRenderer)
    monkeypatch.undo()
    command_renderer().show(StepState("1", "simulating"))
    assert capsys.readouterr() == ("", "simulating\n")


def test_a_service_with_a_launcher_that_has_a_display_reports_to_it(on_terminal, launcher):
    on_terminal()
    found = service_renderer("pd-0", json=False, environ=launcher)
    assert isinstance(found, LauncherRenderer)
    found.close()


def test_a_service_that_starts_again_when_the_display_is_over_writes_lines(on_terminal, tmp_path):
    on_terminal()
    environ = {VARIABLE: str(tmp_path / "gone"), "TERM": "xterm"}
    assert isinstance(service_renderer("pd-0", json=False, environ=environ), LineRenderer)


def test_json_logs_get_records_and_nothing_else(on_terminal, launcher, caplog):
    terminal = on_terminal()
    found = service_renderer("pd-0", json=True, environ=launcher)
    with caplog.at_level(logging.INFO):
        found.show(StepState("1", "loading weights"))
    assert [record.message for record in caplog.records] == ["loading weights"]
    assert terminal.getvalue() == ""
