"""Progress of a worker, reported to the launcher that draws one display for all: datagrams in a socket.

A datagram that does not fit is dropped: no worker ever waits for its display.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import msgspec

from triptych.base.progress.progress import ShortText, StepState

#: The variable with the socket's path, while the launcher has a display.
VARIABLE = "TRIPTYCH_PROGRESS"
#: Datagrams are far shorter; one that is not is no state.
MOST_BYTES = 4096


class _Datagram(msgspec.Struct):
    name: ShortText
    state: StepState


class LauncherRenderer:
    """A renderer that sends states to the launcher; `name` is this worker's, such as "pd-0".

    OSError when the launcher listens no longer.
    """

    interval = 0.25

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise

    def show(self, state: StepState) -> None:
        """Sends it; the launcher may be gone, or have more to read than it keeps."""
        with contextlib.suppress(OSError):
            self._socket.send(encode(self._name, state))

    def ready(self) -> None:
        """Sends that this worker waits for the others."""
        self.show(StepState("ready", "ready", ended=True))

    def close(self) -> None:
        self._socket.close()


def encode(name: str, state: StepState) -> bytes:
    """A datagram of this worker's state."""
    return msgspec.json.encode(_Datagram(name, state))


def decode(data: bytes) -> tuple[str, StepState] | None:
    """(worker, state) of a datagram; None for anything else."""
    try:
        datagram = msgspec.json.decode(data, type=_Datagram)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return datagram.name, datagram.state
