"""The display of a starting cluster: one bar for each worker that loads its model, until all are ready."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from triptych.base.log import logs_json
from triptych.base.progress.launcher import MOST_BYTES, VARIABLE, decode
from triptych.base.progress.progress import StepState
from triptych.base.progress.renderers import TerminalRenderer
from triptych.base.progress.screen import can_draw

#: Datagrams that one turn of the loop reads.
_AT_ONCE = 64


class StartDisplay:
    """Bars on the launcher's terminal, fed by the workers through a socket; none where there is no terminal.

    Workers find the socket by a variable that this process has from `open` to `close`.
    """

    def __init__(self, workers: Sequence[str], renderer: TerminalRenderer | None = None) -> None:
        if renderer is None and can_draw(sys.stderr) and not logs_json():
            renderer = TerminalRenderer(sys.stderr)
        self._workers = workers
        self._renderer = renderer
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Shows all workers as starting; belongs to the running loop."""
        if self._renderer is None:
            return
        # Not the run folder: the path of a socket is short.
        self._folder = tempfile.TemporaryDirectory(prefix="triptych-")
        path = Path(self._folder.name) / "progress"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        os.environ[VARIABLE] = str(path)
        for name in self._workers:
            self._renderer.keep(StepState(name, f"{name}: starting"))

    def close(self) -> None:
        """Leaves nothing on the terminal. Idempotent."""
        if self._renderer is not None:
            self._renderer.close()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        if self._folder is not None:
            os.environ.pop(VARIABLE, None)
            self._folder.cleanup()
            self._folder = None

    def _receive(self) -> None:
        assert self._socket is not None and self._renderer is not None
        for _ in range(_AT_ONCE):
            try:
                data = self._socket.recv(MOST_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            found = decode(data)
            if found is not None and found[0] in self._workers:
                self._renderer.keep(_as_row(*found))


def _as_row(worker: str, state: StepState) -> StepState:
    """The worker's row: its last step stays in it, full, until the next one begins."""
    return replace(state, key=worker, label=f"{worker}: {state.label}")
