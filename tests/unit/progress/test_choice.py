"""Which renderer a process has: its launcher's display, bars, or lines."""

from __future__ import annotations

import io
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from triptych.base.progress.choice import command_renderer, service_renderer
from triptych.base.progress.progress import StepState
from triptych.base.progress.renderers import VARIABLE, LauncherRenderer, LineRenderer


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
