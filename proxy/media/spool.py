"""The media of requests in flight: small items in memory, large ones in unlinked files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from triptych.errors import ConfigError, InternalError, Overloaded
from triptych.metrics import ProxyMetrics

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Sources of one request that are loaded at once.
LOADS_AT_ONCE = 8
#: Items above this go to disk.
MEMORY_ITEM_BYTES = 1 << 20
RETRY_AFTER = 2.0
_THREADS = 4


class MediaSpool:
    """All media of one proxy. `memory_budget` and `disk_budget` are in bytes; above them come 429s."""

    def __init__(
        self, metrics: ProxyMetrics, *, folder: str = "", memory_budget: int, disk_budget: int
    ) -> None:
        self.memory_bytes = 0
        self.disk_bytes = 0
        self._folder = folder or tempfile.gettempdir()
        self._memory_budget = memory_budget
        self._disk_budget = disk_budget
        self._gauge = metrics.media_bytes
        self._lock = threading.Lock()
        self.executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="media")
        check_folder(self._folder)
        self.reserve()

    @property
    def full(self) -> bool:
        """Whether new media would find no room."""
        return self.memory_bytes >= self._memory_budget or self.disk_bytes >= self._disk_budget

    def writer(self) -> SpoolWriter:
        return SpoolWriter(self)

    async def keep(self, media: bytes) -> SpooledMedia:
        """`media`, held once by the caller. Overloaded when there is no room."""
        writer = self.writer()
        try:
            await writer.write(media)
            return await writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def reserve(self, memory: int = 0, disk: int = 0) -> None:
        """Counts bytes that are about to be kept; negative ones give back. Overloaded above a budget."""
        with self._lock:
            over_memory = memory > 0 and self.memory_bytes + memory > self._memory_budget
            over_disk = disk > 0 and self.disk_bytes + disk > self._disk_budget
            if over_memory or over_disk:
                raise Overloaded(
                    "the media of the requests in flight fill the room for them", retry_after=RETRY_AFTER
                )
            self.memory_bytes += memory
            self.disk_bytes += disk
            self._gauge.labels("memory").set(self.memory_bytes)
            self._gauge.labels("disk").set(self.disk_bytes)

    def open_file(self) -> int:
        """A descriptor of a new file that has no name and goes with its last user."""
        flag = getattr(os, "O_TMPFILE", 0)
        if flag:
            with contextlib.suppress(OSError):
                return os.open(self._folder, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC | flag, 0o600)
        descriptor, name = tempfile.mkstemp(prefix="triptych-media-", dir=self._folder)
        os.unlink(name)
        return descriptor

    async def in_thread(self, work: Callable[[], T]) -> T:
        """`work` beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)


def check_folder(folder: str) -> None:
    """ConfigError when spooled files could not be written there."""
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--spool-folder {folder!r} is no folder that can be written to")


class SpoolWriter:
    """One item on its way into the spool; ends with `finish` or `abandon`."""

    def __init__(self, spool: MediaSpool) -> None:
        self.nbytes = 0
        self._spool = spool
        self._pieces: list[bytes] = []
        self._pending = 0
        self._file: SpooledMedia | None = None

    async def write(self, data: bytes) -> None:
        """Adds bytes. Overloaded when they find no room."""
        self._spool.reserve(memory=len(data))
        self.nbytes += len(data)
        self._pending += len(data)
        self._pieces.append(data)
        if self._pending > MEMORY_ITEM_BYTES:
            await self._spill()

    async def finish(self) -> SpooledMedia:
        """The whole item; the caller holds it once."""
        if self._file is None:
            media = SpooledMedia(self._spool, data=b"".join(self._pieces))
        else:
            await self._spill()
            media = self._file
        self._file, self._pieces, self._pending = None, [], 0
        return media

    def abandon(self) -> None:
        """Gives everything back; nothing after `finish`."""
        if self._file is not None:
            self._file.release()
        self._spool.reserve(memory=-self._pending)
        self._file, self._pieces, self._pending = None, [], 0

    async def _spill(self) -> None:
        data = b"".join(self._pieces)
        try:
            if self._file is None:
                self._file = SpooledMedia(self._spool, descriptor=self._spool.open_file())
            await self._file.append(data)
        except OSError as error:
            logger.error("media cannot be spooled: %s", error.strerror)
            raise InternalError("the proxy cannot keep the request's media") from None
        self._spool.reserve(memory=-self._pending)
        self._pieces, self._pending = [], 0


class SpooledMedia:
    """The bytes of one item, in memory or in a file. Freed when its last holder releases it."""

    def __init__(self, spool: MediaSpool, *, data: bytes = b"", descriptor: int = -1) -> None:
        self.nbytes = len(data)
        self.on_disk = descriptor >= 0
        self._spool = spool
        self._data = data
        self._descriptor = descriptor
        self._holders = 1
        self._lock = threading.Lock()

    def retain(self) -> SpooledMedia:
        """One more holder. InternalError when the last one has left."""
        with self._lock:
            if not self._holders:
                raise InternalError("the media of a request that has ended were asked for")
            self._holders += 1
        return self

    def release(self) -> None:
        """One holder fewer."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self._data = b""
        if self.on_disk:
            os.close(self._descriptor)
            self._spool.reserve(disk=-self.nbytes)
        else:
            self._spool.reserve(memory=-self.nbytes)

    async def append(self, data: bytes) -> None:
        """Writes to the file's end, beside the event loop."""
        self._spool.reserve(disk=len(data))
        self.nbytes += len(data)
        await self.in_thread(lambda: _write_all(self._descriptor, data))

    async def frames(self, size: int) -> AsyncIterator[bytes]:
        """The bytes in pieces of `size` and a rest."""
        for at in range(0, self.nbytes, size):
            if self.on_disk:
                count = min(size, self.nbytes - at)
                yield await self.in_thread(partial(_read, self._descriptor, at, count))
            else:
                yield self._data[at : at + size]

    @contextlib.contextmanager
    def view(self) -> Iterator[bytes | memoryview]:
        """All bytes at once, for a thread that hashes them; the caller is a holder until it has ended."""
        if not self.on_disk:
            yield self._data
            return
        with mmap.mmap(self._descriptor, self.nbytes, access=mmap.ACCESS_READ) as mapped:
            view = memoryview(mapped)
            try:
                yield view
            finally:
                view.release()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """`work` beside the event loop.

        The thread is a holder of its own: no descriptor is closed, and used again, under its feet.
        """
        self.retain()
        try:
            future = self._spool.executor.submit(work)
        except BaseException:
            self.release()
            raise
        future.add_done_callback(lambda _: self.release())
        return await asyncio.wrap_future(future)


class MediaHold:
    """One request's media: every source is loaded once, and kept until the request's last user leaves.

    Shared by everything that serves the request: its choices see the same bytes of one URL.
    """

    def __init__(self) -> None:
        #: Bounds the loads that are under way at once.
        self.room = asyncio.Semaphore(LOADS_AT_ONCE)
        self._users = 0
        self._loads: dict[Hashable, asyncio.Task[SpooledMedia]] = {}
        self._counted: list[tuple[MediaSpool, int]] = []

    def join(self) -> None:
        """One more user."""
        self._users += 1

    def leave(self) -> None:
        """One user fewer; with the last one go all media, and loads that are under way."""
        self._users -= 1
        if self._users:
            return
        loads, self._loads = self._loads, {}
        for load in loads.values():
            load.cancel()
            load.add_done_callback(_release)
        counted, self._counted = self._counted, []
        for spool, nbytes in counted:
            spool.reserve(memory=-nbytes)

    def count(self, spool: MediaSpool, nbytes: int) -> None:
        """Counts bytes that the request itself keeps in memory, until the last user leaves."""
        spool.reserve(memory=nbytes)
        self._counted.append((spool, nbytes))

    async def get(
        self, source: Hashable, load: Callable[[], Coroutine[object, None, SpooledMedia]]
    ) -> SpooledMedia:
        """The source's bytes, by `load` at the first call; the hold keeps them, not the caller."""
        task = self._loads.get(source)
        if task is None:
            task = self._loads[source] = asyncio.create_task(load())
        return await asyncio.shield(task)


def _release(load: asyncio.Task[SpooledMedia]) -> None:
    if not load.cancelled() and load.exception() is None:
        load.result().release()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int, at: int, count: int) -> bytes:
    data = os.pread(descriptor, count, at)
    if len(data) != count:
        raise InternalError("a spooled file of media has been cut short")
    return data
