"""A turn on the machine: a lock on a file that all who measure, or keep off for it, agree on."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from triptych.errors import ConfigError

_PERIOD = 0.2


@contextlib.contextmanager
def turn(lock: Path | None, want: Path | None = None, patience: float = 1800.0) -> Iterator[None]:
    """Holds the lock alone. While it is waited for, the file `want` exists, by default LOCK.want.

    Without a lock nothing is waited for. ConfigError after `patience` seconds.
    """
    if lock is None:
        yield
        return
    want = want or lock.with_name(f"{lock.name}.want")
    deadline = time.monotonic() + patience
    with lock.open("ab") as file:
        try:
            want.touch()
            while not _taken(file.fileno()):
                if time.monotonic() > deadline:
                    raise ConfigError(f"--lock {lock} was held by others for {patience:g} s")
                time.sleep(_PERIOD)
        finally:
            want.unlink(missing_ok=True)
        yield


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
