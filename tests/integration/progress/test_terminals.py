"""Progress of real commands, on a terminal and without one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from support.options import triptych
from support.processes.cluster import free_port
from support.simulated import COSTS, MODEL
from triptych.base.progress.screen import CLEAR

TRIPTYCH = (sys.executable, "-m", "triptych.apps.cli")
SECONDS = 55.0
#: The end of a bar and its share, in colours or without.
BAR = re.compile(r"[━╸╺](\x1b\[0m)? +\d+ %")


class OnTerminal:
    """A command whose stdin, stdout and stderr are one terminal of 100 columns."""

    def __init__(self, command: tuple[str, ...], environ: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | environ,
            start_new_session=True,
            # Ctrl-C goes to the session whose terminal this is.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.output = ""
        self._bytes = b""

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def read_until(self, pattern: str) -> None:
        """Reads on until the output has this; an error when the command ends or takes too long."""
        end = time.monotonic() + SECONDS
        while not re.search(pattern, self.output):
            assert self._read(end), f"{pattern!r} is not in {self.output!r}"

    def read_all(self) -> int:
        """Reads on until the command has ended; its exit code."""
        end = time.monotonic() + SECONDS
        while self._read(end):
            pass
        return self.process.wait(SECONDS)

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"nothing more came after {self.output!r}"
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(self._master, 1 << 16)
        self._bytes += data
        self.output = self._bytes.decode(errors="replace")
        return bool(data)

    @property
    def after_last_frame(self) -> str:
        return self.output.rpartition(CLEAR)[2]


@pytest.fixture
def plan(tmp_path: Path) -> tuple[str, ...]:
    """The words of a command that simulates for some seconds."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(COSTS) | {"shape": asdict(MODEL)}))
    load = ("--workload", "image", "--image-size", "640x640", "--output-tokens", "64")
    return ("plan", "--gpu", str(path), "--devices", "2", "--quick", *load)


def test_a_plan_on_a_terminal_has_a_bar_that_is_gone_when_the_table_comes(plan):
    with OnTerminal((*TRIPTYCH, *plan), {"TERM": "xterm", "NO_COLOR": ""}) as command:
        assert command.read_all() == 0
    assert BAR.search(command.output)
    assert "\x1b[36m" in command.output
    assert re.search(r"\d+ of 3 searches", command.output)
    table = command.after_last_frame
    assert "1E1PD" in table and not BAR.search(table)


def test_a_plan_without_a_terminal_has_lines_on_stderr_and_its_result_on_stdout(plan, tmp_path):
    result = tmp_path / "plan.json"
    done = triptych(*plan, "--json", str(result))
    assert done.returncode == 0
    assert done.stderr.splitlines()[0] == "simulating"
    assert "\x1b" not in done.stderr and "\r" not in done.stderr
    assert "simulating" not in done.stdout
    assert "1E1PD" in done.stdout
    assert json.loads(result.read_text())["format"] == "triptych-plan/1"


def serve(*words: str) -> tuple[str, ...]:
    ports = ("--port", str(free_port()), "--grpc-port", str(free_port()))
    return (*TRIPTYCH, "serve", *ports, "--encoders", "1", *words)


def test_a_cluster_on_a_terminal_has_one_display_that_no_log_line_is_mixed_with():
    with OnTerminal(serve(), {"TERM": "xterm", "NO_COLOR": "1"}) as command:
        command.read_until("Triptych answers")
        command.read_until("Ctrl-C ends it")
        command.press_ctrl_c()
        assert command.read_all() == 0
    parts = command.output.split(CLEAR)
    frames = [part for part in parts if re.search("\x1b\\[\\d+A$", part)]
    assert any("pd-0: starting" in frame and "encoder-0: starting" in frame for frame in frames)
    assert all(frame.startswith("\r\n") and frame.count("\r\n") == 2 for frame in frames)
    ready = [part for part in parts if "ready: pd" in part or "ready: encoder" in part]
    assert len(ready) == 2 and all(part.endswith("\r\n") for part in ready)
    greeting = next(index for index, part in enumerate(parts) if "Triptych answers" in part)
    assert not [part for part in parts[greeting:] if re.search("\x1b\\[\\d+A$", part)]
