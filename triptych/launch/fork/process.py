"""Inside the zygote: one worker is forked for each order of the supervisor.

Each worker is forked twice and its middle parent ends at once, so that the worker becomes the supervisor's
own child (which has declared itself the reaper of orphans): the supervisor sees it end, and the worker
outlives the zygote.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from triptych.launch.parent import PARENT_VARIABLE

_ADOPTION_SECONDS = 10.0
_PR_SET_NAME = 15
_PID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Order:
    """One worker: the words after `triptych`, and what its environment has besides the zygote's."""

    name: str
    words: list[str]
    environment: dict[str, str]


def serve_orders(control: socket.socket) -> Order:
    """Forks a worker per order; returns in the workers only. Exits when the supervisor hangs up."""
    if threads() != 1 or "grpc" in sys.modules:
        raise RuntimeError(f"cannot be forked: {threads()} threads, gRPC imported: {'grpc' in sys.modules}")
    _say(control, {"ready": True})
    with control.makefile("rb") as orders:
        for line in orders:
            order = Order(**json.loads(line))
            try:
                pid = _fork_orphan()
            except OSError as error:
                _say(control, {"error": str(error)})
                continue
            if pid == 0:
                # Or the supervisor would not see the zygote end.
                control.close()
                return order
            _say(control, {"pid": pid})
    sys.exit(0)


def become(order: Order) -> None:
    """Makes the forked process what a fresh `triptych` process with these words would be."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, order.name.encode()[:15])
    os.environ.update(order.environment)
    sys.argv = ["triptych", *order.words]
    supervisor = int(order.environment[PARENT_VARIABLE])
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != supervisor:
        if time.monotonic() > deadline:
            sys.exit("triptych: the supervisor is gone")
        time.sleep(0.001)


def threads() -> int:
    """Threads of this process."""
    return len(list(Path("/proc/self/task").iterdir()))


def _fork_orphan() -> int:
    """0 in the new process; in the caller its id. OSError when there can be no new process."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle:
        os.close(writer)
        said = os.read(reader, _PID_BYTES)
        os.close(reader)
        os.waitpid(middle, 0)
        if not said:
            raise OSError("fork failed")
        return int.from_bytes(said, "little")
    try:
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid:
        os.write(writer, pid.to_bytes(_PID_BYTES, "little"))
        os._exit(0)
    os.close(reader)
    os.close(writer)
    return 0


def _say(control: socket.socket, message: dict[str, object]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")
