"""Host copies: embeddings that were received and verified, in memory of a byte budget.

Where vLLM's scheduler and worker share a process, a copy is that process's memory. Otherwise it is a file in
a memory file system, which the workers map: its blocks are reserved before they are written, since a write
into a full /dev/shm would be a SIGBUS, which ends the engine. Memory of both kinds is used again within the
budget: the first write of new pages costs several copies. For a GPU of this process it is page-locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from triptych.base.machine.device import Device
from triptych.base.types import ItemPlan
from triptych.ec_connector.connectors.host_buffers import PinnedMemory, PinnedPool, ReusedMemory, bytes_of
from triptych.store.bulk import Received, ScatterBuffer

logger = logging.getLogger(__name__)

_PREFIX = "triptych-ec-"
_LOCK = "lock"
#: Smaller files are not kept for reuse, and workers copy out of them: each would cost them a descriptor.
LARGE_BYTES = 256 << 10


@dataclass(eq=False, slots=True)
class CopyFile:
    """A file of `size` bytes, all of them reserved, and its mapping."""

    path: str
    size: int
    mapped: mmap.mmap = field(repr=False)

    def resize(self, nbytes: int) -> bool:
        """Makes it `nbytes` long; False where a worker or a view still reads it. OSError without room."""
        with _opened(self.path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.mapped.resize(nbytes)
            except (BlockingIOError, BufferError):
                return False
            if nbytes > self.size:
                os.posix_fallocate(file, 0, nbytes)
        self.size = nbytes
        return True

    def close(self) -> None:
        """Removes it. Its memory is freed at once, or with the rows that a worker has in it."""
        with contextlib.suppress(FileNotFoundError):
            # A view that a failed transfer's traceback still holds: the mapping ends with it.
            with contextlib.suppress(BufferError, BlockingIOError), _opened(self.path) as file:
                self.mapped.close()
                # Workers keep their mappings.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(file, 0)
            os.unlink(self.path)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


@dataclass(slots=True)
class HostCopy:
    """The memory of one item: in `file`, in page-locked `pieces`, or this process's own without either."""

    plan: ItemPlan
    memory: Received = field(repr=False)
    file: CopyFile | None = None
    pieces: Sequence[torch.Tensor] = field(default=(), repr=False)

    @property
    def path(self) -> str:
        """Of its file; empty without one."""
        return "" if self.file is None else self.file.path


class CopyFolder:
    """A folder for the files of one process, which the next one removes if this one was killed.

    The process holds a lock on a file in it: a folder whose lock is free has no owner any more. `allocate` is
    for one thread; files come back from any.
    """

    def __init__(self, parent: str) -> None:
        remove_abandoned(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._count = 0
        #: The longest unused first.
        self._free = deque[CopyFile]()

    def allocate(self, nbytes: int, *, kept: int) -> CopyFile:
        """A file of `nbytes`, mapped; afterwards at most `kept` bytes of others wait for reuse.

        OSError when the file system has no room.
        """
        found: CopyFile | None = None
        for _ in range(len(self._free)):
            file = self._free.popleft()
            similar = nbytes <= 2 * file.size <= 4 * nbytes
            try:
                taken = found is None and similar and file.resize(nbytes)
            except OSError:
                file.close()
                raise
            if taken:
                found = file
            elif file.size <= kept:
                kept -= file.size
                self._free.append(file)
            else:
                file.close()
        return self._new(nbytes) if found is None else found

    def _new(self, nbytes: int) -> CopyFile:
        self._count += 1
        path = self.path / str(self._count)
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, nbytes)
            return CopyFile(str(path), nbytes, mmap.mmap(file, nbytes))
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(file)

    def free(self, file: CopyFile) -> None:
        """Keeps a large file for reuse, and removes a small one. No step orders a load of it any more."""
        if file.size < LARGE_BYTES:
            file.close()
        else:
            self._free.append(file)

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


def locked_pool(nbytes: int, device: torch.device) -> PinnedPool | None:
    """Host memory that a GPU of this process copies from without staging; None where it cannot be locked."""
    try:
        return PinnedPool(PinnedMemory(nbytes, Device.of(device)))
    except (RuntimeError, OSError) as error:
        logger.warning("host copies are not page-locked, so that the GPU takes them more slowly: %s", error)
        return None


class HostCopies:
    """The host copies of a scheduler within `limit` bytes.

    In files where `folder` is given, in memory of `pool`, which has `limit` bytes, where that is. `allocate`
    is for one thread; copies are freed in any.
    """

    def __init__(self, limit: int, folder: CopyFolder | None = None, pool: PinnedPool | None = None) -> None:
        self.limit = limit
        self.used = 0
        self._folder = folder
        self._pool = pool
        self._memory = ReusedMemory()
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
            kept = self.limit - self.used
            # All of `limit` is the pool's, if in several pieces.
            pieces = self._pool.allocate(plan.nbytes) if self._pool is not None else ()
        try:
            if pieces:
                return HostCopy(plan, ScatterBuffer([bytes_of(piece) for piece in pieces]), None, pieces)
            if self._folder is None or not plan.nbytes:
                return HostCopy(plan, bytes_of(self._memory.empty(plan.nbytes, kept=kept)))
            file = self._folder.allocate(plan.nbytes, kept=kept)
        except BaseException:
            self._give_back(plan.nbytes)
            raise
        return HostCopy(plan, memoryview(file.mapped)[: plan.nbytes], file)

    def free(self, copy: HostCopy) -> None:
        """Frees a copy that no step orders any more. Rows that a worker has read of it stay."""
        if copy.file is not None and self._folder is not None:
            assert isinstance(copy.memory, memoryview)
            copy.memory.release()
            self._folder.free(copy.file)
        if copy.pieces and self._pool is not None:
            with self._lock:
                self._pool.free(copy.pieces)
        # Memory of this process is used again once no rows are in it.
        copy.memory = memoryview(b"")
        self._give_back(copy.plan.nbytes)

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self.used -= nbytes

    def close(self) -> None:
        """Removes all files; their memory is freed with the last mapping."""
        if self._folder is not None:
            self._folder.close()
