"""The machine lock: an exclusive lock on a file, so that only one measurement runs at a time."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from triptych.errors import ConfigError

_PERIOD = 0.2


@contextlib.contextmanager
def machine_lock(lock: Path | None, want: Path | None = None, patience: float = 1800.0) -> Iterator[None]:
    """Holds the lock. While it is waited for, the file `want` exists, by default LOCK.want.

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
            while not _acquire(file.fileno()):
                if time.monotonic() > deadline:
                    raise ConfigError(f"--lock {lock} was not free for {patience:g} s: end what holds it")
                time.sleep(_PERIOD)
        finally:
            want.unlink(missing_ok=True)
        yield


def _acquire(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
