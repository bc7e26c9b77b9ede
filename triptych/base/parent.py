"""Child processes: a supervised one ends with its supervisor, even a killed one, and has its environment."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

#: The supervisor's process id, as the supervisor hands it down.
PARENT_VARIABLE = "TRIPTYCH_SUPERVISOR_PID"
#: The file that a process that cannot work as configured leaves its sentence in, for the supervisor.
CAUSE_VARIABLE = "TRIPTYCH_CAUSE_FILE"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Asks Linux for SIGTERM when the supervisor named by the environment dies; no supervisor, no effect."""
    parent = os.environ.get(PARENT_VARIABLE)
    if not parent or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("triptych: the supervisor is gone")


#: What this process has set for its own libraries, and what these variables were before.
_set: dict[str, tuple[str, str | None]] = {}


def set_variable(name: str, value: str, *, replace: bool = False) -> None:
    """Sets a variable for the libraries of this process; children by `supervised` do not have it.

    One that is there already stays, unless it is to be replaced.
    """
    before = os.environ.get(name)
    if before is None or replace:
        earlier = _set.get(name)
        _set[name] = (value, earlier[1] if earlier is not None and earlier[0] == before else before)
        os.environ[name] = value


def given_environment() -> dict[str, str]:
    """The environment as this process was given it: without what it has set for itself since."""
    given = dict(os.environ)
    for name, (value, before) in _set.items():
        if given.get(name) == value:
            del given[name]
            given |= {} if before is None else {name: before}
    return given


def supervised(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(command, environment) of a process that runs `command`, any program, and ends with the calling one."""
    environment = given_environment() | {PARENT_VARIABLE: str(os.getpid())}
    return [sys.executable, "-I", "-S", __file__, *command], environment


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants whose own parent has ended. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_on_sigterm(process: int) -> None:
    """Makes SIGTERM end `process`, this one, where it is a container's first.

    Linux drops SIGTERM there while nothing handles it: a worker that is stopped while it loads its model
    would load it, serve, and be killed when the grace period ends. Services that are ready handle SIGTERM
    themselves.
    """
    if process == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def main(command: list[str]) -> None:
    """Becomes `command`, which knows nothing of supervisors and ends with ours all the same."""
    die_with_parent()
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
