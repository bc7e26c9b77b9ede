"""The display of a starting cluster: a row for each worker, none for strangers, nothing left when it ends."""

from __future__ import annotations

import asyncio
import io
import os
import socket
from pathlib import Path

import pytest

from triptych.apps.launch.supervisor import StartDisplay
from triptych.base.progress.progress import StepState
from triptych.base.progress.renderers import VARIABLE, LauncherRenderer, TerminalRenderer, encode
from triptych.base.progress.screen import CLEAR


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Shown:
    """A display on a terminal that a test reads."""

    def __init__(self) -> None:
        self.terminal = Terminal()
        self.renderer = TerminalRenderer(self.terminal)
        self.display = StartDisplay(["pd-0", "encoder-0"], self.renderer)

    def frame(self) -> str:
        self.renderer.draw()
        return self.terminal.getvalue().rsplit(CLEAR, 1)[1]

    async def sees(self, text: str) -> None:
        async with asyncio.timeout(10):
            while text not in self.frame():
                await asyncio.sleep(0.01)


@pytest.fixture
async def shown():
    found = Shown()
    found.display.open()
    yield found
    found.display.close()


async def test_a_worker_of_this_process_s_environment_has_its_step_in_its_row(shown):
    worker = LauncherRenderer(Path(os.environ[VARIABLE]), "pd-0")
    worker.show(StepState("1", "loading weights", 5, 10))
    await shown.sees("pd-0: loading weights")
    assert "50 %" in shown.frame()
    worker.show(StepState("1", "loading weights", 10, 10, ended=True))
    await shown.sees("100 %")
    worker.ready()
    await shown.sees("pd-0: ready")
    assert shown.frame().count("pd-0") == 1
    worker.close()


async def test_a_stranger_and_noise_have_no_row(shown):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for data in (b"\xff" * 8000, b"{}", encode("stranger", StepState("1", "evil"))):
            sender.sendto(data, os.environ[VARIABLE])
        sender.sendto(encode("encoder-0", StepState("1", "warming up")), os.environ[VARIABLE])
    await shown.sees("encoder-0: warming up")
    assert "evil" not in shown.frame() and "stranger" not in shown.frame()


async def test_an_ended_display_leaves_no_bar_no_socket_and_no_variable(shown):
    path = Path(os.environ[VARIABLE])
    shown.frame()
    shown.display.close()
    shown.display.close()
    assert shown.terminal.getvalue().endswith(CLEAR)
    assert VARIABLE not in os.environ
    assert not path.parent.exists()


async def test_the_folder_of_the_socket_is_the_user_s_alone(shown):
    assert Path(os.environ[VARIABLE]).parent.stat().st_mode & 0o077 == 0
