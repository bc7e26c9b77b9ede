"""Host copies: embeddings that were received and verified, in memory of a byte budget.

Where vLLM's scheduler and worker share a process, a copy is that process's memory. Otherwise it is a file in
a memory file system, which the workers map: its blocks are reserved before they are written, since a write
into a full /dev/shm would be a SIGBUS, which ends the engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from triptych.base.types import ItemPlan

_PREFIX = "triptych-ec-"
_LOCK = "lock"


@dataclass(slots=True)
class HostCopy:
    """The memory of one item. `path` is its file, empty where it is this process's own memory."""

    plan: ItemPlan
    memory: memoryview = field(repr=False)
    path: str = ""
    mapped: mmap.mmap | None = field(default=None, repr=False)


class CopyFolder:
    """A folder for the files of one process, which the next one removes if this one was killed.

    The process holds a lock on a file in it: a folder whose lock is free has no owner any more.
    """

    def __init__(self, parent: str) -> None:
        remove_abandoned(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._count = 0

    def allocate(self, nbytes: int) -> tuple[str, mmap.mmap]:
        """A new file of `nbytes`, mapped. OSError when the file system has no room."""
        self._count += 1
        path = self.path / str(self._count)
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, nbytes)
            return str(path), mmap.mmap(file, nbytes)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(file)

    def close(self) -> None:
        """Removes the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(parent: Path) -> None:
    """Removes the folders of processes that have ended without doing so."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            file = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)


class HostCopies:
    """The host copies of a scheduler within `limit` bytes; in files where `folder` is given. Thread-safe."""

    def __init__(self, limit: int, folder: CopyFolder | None = None) -> None:
        self.limit = limit
        self.used = 0
        self._folder = folder
        self._lock = threading.Lock()

    def allocate(self, plan: ItemPlan) -> HostCopy | int:
        """Memory for the item, or the number of bytes that are missing.

        OSError or MemoryError when the system has none.
        """
        with self._lock:
            missing = self.used + plan.nbytes - self.limit
            if missing > 0:
                return missing
            self.used += plan.nbytes
        try:
            if self._folder is None or not plan.nbytes:
                return HostCopy(plan, memoryview(bytearray(plan.nbytes)))
            path, mapped = self._folder.allocate(plan.nbytes)
        except BaseException:
            self._give_back(plan.nbytes)
            raise
        return HostCopy(plan, memoryview(mapped), path, mapped)

    def free(self, copy: HostCopy) -> None:
        """Frees a copy that no step reads any more."""
        copy.memory.release()
        if copy.mapped is not None:
            # A view that a failed transfer's traceback still holds: the mapping ends with it.
            with contextlib.suppress(BufferError):
                copy.mapped.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy.path)
        self._give_back(copy.plan.nbytes)

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self.used -= nbytes

    def close(self) -> None:
        """Removes all files; their memory is freed with the last mapping."""
        if self._folder is not None:
            self._folder.close()
