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
from functools import partial
from typing import TypeVar

from triptych.base.errors import ConfigError, InternalError
from triptych.base.metrics import ProxyMetrics
from triptych.proxy.quotas.current_call import current_call
from triptych.proxy.quotas.quota import Hold, QuotaThreads
from triptych.proxy.quotas.table import QuotaTable

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Sources of one request that are loaded concurrently.
LOADS_AT_ONCE = 8
#: Larger items are written to disk.
MEMORY_ITEM_BYTES = 1 << 20


class MediaSpool:
    """The storage of one proxy's media, within byte budgets; beyond these requests get a 429."""

    def __init__(self, metrics: ProxyMetrics, quotas: QuotaTable, *, folder: str = "") -> None:
        self._folder = folder or tempfile.gettempdir()
        self._memory, self._disk = quotas["media"], quotas["media-disk"]
        #: What each holder has of either; changed under the lock, in any thread.
        self._holds: dict[tuple[str, str], Hold] = {}
        self._gauge = metrics.media_bytes
        self._lock = threading.Lock()
        self.threads = QuotaThreads(quotas["loads"], "media")
        check_folder(self._folder)
        self.reserve("")

    @property
    def memory_bytes(self) -> int:
        return self._memory.used

    @property
    def disk_bytes(self) -> int:
        return self._disk.used

    @property
    def full(self) -> bool:
        """Whether no memory is left for new media."""
        return self._memory.free <= 0 or self._disk.free <= 0

    def writer(self) -> SpoolWriter:
        return SpoolWriter(self)

    async def keep(self, media: bytes | memoryview) -> SpooledMedia:
        """Stores `media`, with the caller as its holder. Overloaded when no memory is left."""
        writer = self.writer()
        try:
            await writer.write(media)
            return await writer.finish()
        except BaseException:
            writer.abandon()
            raise

    def reserve(self, holder: str, memory: int = 0, disk: int = 0) -> None:
        """Reserves bytes for the holder; negative numbers release them. QuotaExceeded beyond its share."""
        with self._lock:
            for quota, amount in ((self._memory, memory), (self._disk, disk)):
                key = quota.spec.name, holder
                hold = self._holds[key] = self._holds.get(key) or quota.hold(holder)
                try:
                    hold.add(max(amount, 0))
                    hold.remove(max(-amount, 0))
                finally:
                    if not hold.amount:
                        self._holds.pop(key).close()
            self._gauge.labels("memory").set(self.memory_bytes)
            self._gauge.labels("disk").set(self.disk_bytes)

    def open_file(self) -> int:
        """A descriptor of a new unlinked file, which is deleted when the descriptor is closed."""
        flag = getattr(os, "O_TMPFILE", 0)
        if flag:
            with contextlib.suppress(OSError):
                return os.open(self._folder, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC | flag, 0o600)
        descriptor, name = tempfile.mkstemp(prefix="triptych-media-", dir=self._folder)
        os.unlink(name)
        return descriptor

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread."""
        return await self.threads.run(current_call().holder, work)

    def close(self) -> None:
        self.threads.close()


def check_folder(folder: str) -> None:
    """ConfigError when spooled files could not be written there."""
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--spool-folder {folder!r} is not a writable folder")


class SpoolWriter:
    """A writer of one item; must end with `finish` or `abandon`."""

    def __init__(self, spool: MediaSpool) -> None:
        self.nbytes = 0
        self.holder = current_call().holder
        self._spool = spool
        self._pieces: list[bytes | memoryview] = []
        self._pending = 0
        self._file: SpooledMedia | None = None

    async def write(self, data: bytes | memoryview) -> None:
        """Appends bytes. Overloaded when no memory is left for them."""
        self._spool.reserve(self.holder, memory=len(data))
        self.nbytes += len(data)
        self._pending += len(data)
        self._pieces.append(data)
        if self._pending > MEMORY_ITEM_BYTES:
            await self._spill()

    async def finish(self) -> SpooledMedia:
        """The complete item, with the caller as its holder."""
        if self._file is None:
            media = SpooledMedia(self._spool, self.holder, data=b"".join(self._pieces))
        else:
            await self._spill()
            media = self._file
        self._file, self._pieces, self._pending = None, [], 0
        return media

    def abandon(self) -> None:
        """Frees everything; does nothing after `finish`."""
        if self._file is not None:
            self._file.release()
        self._spool.reserve(self.holder, memory=-self._pending)
        self._file, self._pieces, self._pending = None, [], 0

    async def _spill(self) -> None:
        # A large one is written as it is: it may be a part of a message.
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        try:
            if self._file is None:
                self._file = SpooledMedia(self._spool, self.holder, descriptor=self._spool.open_file())
            await self._file.append(data)
        except OSError as error:
            logger.error("media cannot be spooled: %s", error.strerror)
            raise InternalError("the proxy cannot keep the request's media") from None
        self._spool.reserve(self.holder, memory=-self._pending)
        self._pieces, self._pending = [], 0


class SpooledMedia:
    """The bytes of one item, in memory or in a file. Freed when its last holder releases it."""

    def __init__(self, spool: MediaSpool, holder: str, *, data: bytes = b"", descriptor: int = -1) -> None:
        self.holder = holder
        self.nbytes = len(data)
        self.on_disk = descriptor >= 0
        self._spool = spool
        self._data = data
        self._descriptor = descriptor
        self._holders = 1
        self._lock = threading.Lock()

    def retain(self) -> SpooledMedia:
        """Adds a holder. InternalError when the last one has released it."""
        with self._lock:
            if not self._holders:
                raise InternalError("the media of the request are released already")
            self._holders += 1
        return self

    def release(self) -> None:
        """Removes a holder; the last one frees the bytes."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self._data = b""
        if self.on_disk:
            os.close(self._descriptor)
            self._spool.reserve(self.holder, disk=-self.nbytes)
        else:
            self._spool.reserve(self.holder, memory=-self.nbytes)

    async def append(self, data: bytes | memoryview) -> None:
        """Appends to the file, in a thread."""
        self._spool.reserve(self.holder, disk=len(data))
        self.nbytes += len(data)
        await self.in_thread(lambda: _write_all(self._descriptor, data))

    async def frames(self, size: int) -> AsyncIterator[bytes]:
        """The bytes in frames of `size`; the last one may be shorter."""
        for at in range(0, self.nbytes, size):
            if self.on_disk:
                count = min(size, self.nbytes - at)
                yield await self.in_thread(partial(_read, self._descriptor, at, count))
            else:
                yield self._data[at : at + size]

    @contextlib.contextmanager
    def view(self) -> Iterator[bytes | memoryview]:
        """All bytes at once, for a thread that hashes them; the caller must be a holder until it ends."""
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
        """Runs `work` in a thread.

        The thread is a holder itself, so that the descriptor is not closed and reused while it runs.
        """
        self.retain()
        return await self._spool.threads.run(self.holder, work, self.release)


class MediaHold:
    """One request's media: each source is loaded once, and kept until the last user leaves.

    Shared by all choices of the request, which see the same bytes of one URL.
    """

    def __init__(self) -> None:
        #: Limits concurrent loads.
        self.load_slots = asyncio.Semaphore(LOADS_AT_ONCE)
        self._users = 0
        self._loads: dict[Hashable, asyncio.Task[SpooledMedia]] = {}
        self._counted: list[tuple[MediaSpool, str, int]] = []

    def join(self) -> None:
        """Adds a user."""
        self._users += 1

    def leave(self) -> None:
        """Removes a user; the last one releases all media and cancels running loads."""
        self._users -= 1
        if self._users:
            return
        loads, self._loads = self._loads, {}
        for load in loads.values():
            load.cancel()
            load.add_done_callback(_release)
        counted, self._counted = self._counted, []
        for spool, holder, nbytes in counted:
            spool.reserve(holder, memory=-nbytes)

    def count(self, spool: MediaSpool, nbytes: int) -> None:
        """Reserves memory for bytes that the request itself keeps, until the last user leaves."""
        holder = current_call().holder
        spool.reserve(holder, memory=nbytes)
        self._counted.append((spool, holder, nbytes))

    async def get(
        self, source: Hashable, load: Callable[[], Coroutine[object, None, SpooledMedia]]
    ) -> SpooledMedia:
        """The source's bytes, loaded at the first call; this object is their holder, not the caller."""
        task = self._loads.get(source)
        if task is None:
            task = self._loads[source] = asyncio.create_task(load())
        return await asyncio.shield(task)


def _release(load: asyncio.Task[SpooledMedia]) -> None:
    if not load.cancelled() and load.exception() is None:
        load.result().release()


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int, at: int, count: int) -> bytes:
    data = os.pread(descriptor, count, at)
    if len(data) != count:
        raise InternalError("a spooled file of media has been cut short")
    return data
