"""`python -m triptych.apps.launch.fork.server MODEL FORMAT FD`: imports MODEL's modules, forks its workers.

Requests come from the supervisor over the socket FD, a JSON object in each line. Each worker is forked twice
and its middle parent ends at once, so that the worker becomes the supervisor's own child (which has declared
itself the reaper of orphans): the supervisor sees it end, and the worker outlives the fork server.

Not multiprocessing's forkserver: there a worker is the server's child, whose end the supervisor takes for the
worker's; a start waits for the imports without a deadline, and a worker's atexit handlers do not run.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import runpy
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from triptych.base.cpu.threads import library_environment
from triptych.base.errors import ConfigError
from triptych.base.log import setup_logging
from triptych.base.parent import PARENT_VARIABLE, die_with_parent, set_variable

#: What workers import besides the model's code, without gRPC.
_ALSO = ("transformers.models.auto.tokenization_auto", "triptych.models.identity", "triptych.apps.cli")
_ADOPTION_SECONDS = 10.0
_PR_SET_NAME = 15
_PID_BYTES = 8


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """One worker: the words after `triptych`, and what its environment has besides the fork server's."""

    name: str
    words: list[str]
    environment: dict[str, str]


class ForkReply(TypedDict, total=False):
    """A line of the fork server: `ready` after the imports, then the new process's id or an error."""

    ready: bool
    pid: int
    error: str


def import_all(model: Path) -> None:
    """Imports what the model's workers import. No gRPC: it does not survive a fork."""
    library_environment()
    # The one library that starts threads when it is imported; workers need no BLAS but torch's.
    set_variable("OPENBLAS_NUM_THREADS", "1", replace=True)
    from triptych.models.preload import preload, quick_imports

    with quick_imports():
        try:
            preload(model)
            for name in _ALSO:
                importlib.import_module(name)
        except ConfigError:
            # Each worker reports it itself, and exits as it would without a fork server.
            logging.getLogger("launch").debug("not everything could be imported", exc_info=True)


def serve_requests(control: socket.socket) -> ForkRequest:
    """Forks a worker per request; returns in the workers only. Exits when the socket is closed."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1 or "grpc" in sys.modules:
        raise RuntimeError(f"cannot be forked: {threads} threads, gRPC imported: {'grpc' in sys.modules}")
    _send(control, {"ready": True})
    with control.makefile("rb") as lines:
        for line in lines:
            request = ForkRequest(**json.loads(line))
            try:
                pid = _fork_orphan()
            except OSError as error:
                _send(control, {"error": str(error)})
                continue
            if pid == 0:
                # Or the supervisor would not see the fork server end.
                control.close()
                return request
            _send(control, {"pid": pid})
    sys.exit(0)


def become(request: ForkRequest) -> None:
    """Makes the forked process what a fresh `triptych` process with these words would be."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, request.name.encode()[:15])
    os.environ.update(request.environment)
    sys.argv = ["triptych", *request.words]
    supervisor = int(request.environment[PARENT_VARIABLE])
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != supervisor:
        if time.monotonic() > deadline:
            sys.exit("triptych: the supervisor is gone")
        time.sleep(0.001)


def _fork_orphan() -> int:
    """0 in the new process; in the caller its id. OSError when there can be no new process."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle:
        os.close(writer)
        answer = os.read(reader, _PID_BYTES)
        os.close(reader)
        os.waitpid(middle, 0)
        if not answer:
            raise OSError("fork failed")
        return int.from_bytes(answer, "little")
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


def _send(control: socket.socket, reply: ForkReply) -> None:
    control.sendall(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    setup_logging("fork-server", log_format=sys.argv[2])
    die_with_parent()
    import_all(Path(sys.argv[1]))
    become(serve_requests(socket.socket(fileno=int(sys.argv[3]))))
    runpy.run_module("triptych.apps.cli", run_name="__main__")
