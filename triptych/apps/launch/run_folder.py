"""The folder of one running cluster: its store's socket and the files about its processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triptych.base.errors import ConfigError

_LOCK = "serve.lock"


@contextmanager
def run_folder(wanted: str) -> Iterator[Path]:
    """The folder `wanted` by --run-dir, or a new one that goes at the end, for this process alone.

    ConfigError where another cluster runs in it: two would replace each other's store.
    """
    path = Path(wanted or tempfile.mkdtemp(prefix="triptych-")).absolute()
    try:
        lock = _lock(path)
        try:
            yield path
        finally:
            os.close(lock)
    finally:
        if not wanted:
            shutil.rmtree(path, ignore_errors=True)


def _lock(path: Path) -> int:
    """The open lock file. The lock ends with this process at the latest; the file stays."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"--run-dir {path} cannot be used ({error.strerror}): name a folder that may be written"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError(
            f"--run-dir {path} is in use by another `triptych serve`: name another folder, or leave it out"
        ) from error
    return lock
