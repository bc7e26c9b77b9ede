"""The direct path past the store: outputs that an encoder worker serves from its memory, and their loads."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event

import numpy as np

from triptych.base.log import log_fields, short
from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.ec_connector.base import DirectTransfer
from triptych.ec_connector.connectors.segments import SegmentPool, SharedSegment, is_sealed
from triptych.ec_connector.int8_rows import finite_scales
from triptych.kernels.functions import copy_checked
from triptych.store.address import StoreAddress
from triptych.store.bulk import SLOWEST, BulkError, Loaded, LoadResult, Missing, Received
from triptych.store.bulk_reader import ArrivingItem, BulkReader
from triptych.store.codec import PendingHead
from triptych.store.sockets import command, same_user
from triptych.store.tls import StoreTls

logger = logging.getLogger(__name__)

#: Seconds after which an output that nobody has read, and that is not in the store, may be evicted.
KEPT_SECONDS = 60.0


class NotFiniteError(Exception):
    """An output has NaN or infinity."""


@dataclass(eq=False, slots=True)
class ServedOutput:
    """One embedding as the store has it, head and body in one."""

    plan: ItemPlan
    source: EmbeddingSource
    segment: SharedSegment
    head: bytes
    nbytes: int
    since: float
    #: Connections that read it now.
    readers: int = 0
    stored: bool = False
    evicted: bool = False
    #: Done once a reader has had it.
    first_read: Future[None] = field(default_factory=Future)

    @property
    def view(self) -> memoryview:
        return memoryview(self.segment.memory)[: self.nbytes]

    def reusable(self, before: float) -> bool:
        """Its memory may be given to another output: it has been read or stored, or is from `before`."""
        return not self.readers and (self.first_read.done() or self.stored or self.since < before)


class ServedOutputs:
    """The served embeddings of one encoder worker within `limit` bytes; safe between threads.

    Memory of the oldest that are both read and stored is used again before new memory is taken, whose first
    write costs more than ten copies; within a full limit, also that of those that are read or stored. What
    is being read keeps its bytes until the reader has ended. `socket` and `address` are those of its server.
    """

    def __init__(self, limit: int, *, socket: str, address: str) -> None:
        self._pool = SegmentPool(limit)
        self._socket, self._address = socket, address
        self._lock = threading.Lock()
        self._by_hash: OrderedDict[str, ServedOutput] = OrderedDict()
        self._by_name: dict[str, ServedOutput] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self._pool.nbytes

    def __len__(self) -> int:
        return len(self._by_hash)

    def get(self, plan: ItemPlan) -> ServedOutput | None:
        """The output that is served by this plan."""
        with self._lock:
            known = self._by_hash.get(plan.mm_hash)
            return known if known is not None and known.plan == plan else None

    def offer(self, plan: ItemPlan, head: PendingHead, body: memoryview) -> ServedOutput | None:
        """The output, readable from now on; None when there is no room. NotFiniteError, in any thread.

        One pass over `body` copies it, completes the head and checks the numbers.
        """
        nbytes = head.nbytes + len(body)
        with self._lock:
            segment = self._acquire(nbytes)
        if segment is None:
            return None
        try:
            raw = _filled(segment, plan, head, body)
        except BaseException:
            with self._lock:
                self._pool.release(segment)
            raise
        source = EmbeddingSource(secrets.token_hex(16), self._socket, self._address)
        output = ServedOutput(plan, source, segment, raw, nbytes, time.monotonic())
        with self._lock:
            if (before := self._by_hash.get(plan.mm_hash)) is not None:
                self._evict(before)
            self._by_hash[plan.mm_hash] = self._by_name[source.name] = output
        return output

    def first_read(self, mm_hash: str) -> Future[None] | None:
        """Done once a reader has had the embedding; None where it is not served."""
        with self._lock:
            output = self._by_hash.get(mm_hash)
            return None if output is None else output.first_read

    def stored(self, mm_hash: str) -> None:
        """The embedding is in the store, too."""
        with self._lock:
            if (output := self._by_hash.get(mm_hash)) is not None:
                output.stored = True

    @contextmanager
    def reading(self, name: str) -> Iterator[ServedOutput | None]:
        """The output of this name, which stays until the block ends; None when it is gone."""
        with self._lock:
            output = self._by_name.get(name)
            if output is not None:
                output.readers += 1
        try:
            yield output
        finally:
            if output is not None:
                with self._lock:
                    output.readers -= 1
                    if not output.first_read.done():
                        output.first_read.set_result(None)
                    self._free(output)

    def close(self) -> None:
        """Frees all that nobody reads."""
        with self._lock:
            for output in list(self._by_hash.values()):
                self._evict(output)
            self._pool.close()

    def _acquire(self, nbytes: int) -> SharedSegment | None:
        if nbytes > self._pool.limit:
            return None
        outputs = list(self._by_hash.values())
        used_up = (o for o in outputs if o.stored and o.first_read.done() and not o.readers)
        if (last := next((o for o in used_up if self._pool.fits(nbytes, o.segment)), None)) is not None:
            self._evict(last)
        before = time.monotonic() - KEPT_SECONDS
        for output in outputs:
            if (segment := self._pool.acquire(nbytes)) is not None:
                return segment
            if not output.evicted and output.reusable(before):
                self._evict(output)
        return self._pool.acquire(nbytes)

    def _evict(self, output: ServedOutput) -> None:
        del self._by_hash[output.plan.mm_hash], self._by_name[output.source.name]
        output.evicted = True
        self._free(output)

    def _free(self, output: ServedOutput) -> None:
        if output.evicted and not output.readers:
            self._pool.release(output.segment)


def _filled(segment: SharedSegment, plan: ItemPlan, head: PendingHead, body: memoryview) -> bytes:
    """The head, after it and the body were copied into the segment."""
    target = np.frombuffer(segment.memory, dtype=np.uint8, count=len(body), offset=head.nbytes)
    finite = copy_checked(np.frombuffer(body, dtype=np.uint8), target, plan.dtype, head.update)
    if not finite or (plan.scales and not finite_scales(body, plan)):
        raise NotFiniteError
    raw = segment.memory[: head.nbytes] = head.finish()
    return raw


#: Seconds for a connection, and for an answer beside its bytes.
CONNECT_SECONDS, ANSWER_SECONDS = 1.0, 2.0
#: Seconds in which a socket or port that could not be reached is not tried again.
AVOIDED_SECONDS = 10.0
#: Connections kept to one data port or socket.
_IDLE = 4
#: A smaller value comes through the socket in one reply: a memory file costs a connection and a thread more.
_SMALL_BYTES = 2 << 20
#: Bytes read from shared memory at once: they are hashed while they are in the CPU's cache.
_PIECE = 512 << 10


class DirectLoads:
    """Reads from encoder workers, in one event loop.

    Neither a source nor what it serves is trusted: the value is checked as one of the store.
    """

    def __init__(self, direct: DirectTransfer, clock: Callable[[], float] = time.monotonic) -> None:
        self._token = direct.token.partition("\n")[0]
        files = direct.tls
        self._tls = None if files is None else StoreTls(files.ca, files.cert, files.key, files.name)
        self._clock = clock
        self._avoided: dict[str, float] = {}
        self._idle: dict[str, list[BulkReader]] = {}

    async def load(self, plan: ItemPlan, source: EmbeddingSource, body: Received) -> tuple[LoadResult, str]:
        """The item in `body` and the path by which it came; Missing when neither path has it. Never raises
        for what the other side does."""
        result: LoadResult = Missing("no path")
        for path, place, read in (
            ("shm", source.socket, self._read_shared),
            ("peer", source.address, self._read_peer),
        ):
            if not place or self._avoided.get(place, 0.0) > self._clock():
                continue
            try:
                result = await read(place, source.name, ArrivingItem(plan, body), plan.nbytes)
            except (OSError, BulkError, TimeoutError, ValueError) as error:
                result = Missing(f"{path}: {error or 'no answer in time'}")
                self._avoid(place, error)
            if isinstance(result, Loaded):
                return result, path
            logger.debug(
                "%s not by %s: %s",
                short(plan.mm_hash),
                path,
                result.reason,
                extra=log_fields(mm_hash=plan.mm_hash),
            )
        return result, ""

    def close(self) -> None:
        """Closes the connections."""
        for readers in self._idle.values():
            for reader in readers:
                reader.close()
        self._idle.clear()

    def _avoid(self, place: str, error: Exception) -> None:
        if isinstance(error, BulkError | ValueError):
            return  # it answered
        now = self._clock()
        self._avoided = {known: until for known, until in self._avoided.items() if until > now}
        self._avoided[place] = now + AVOIDED_SECONDS

    async def _read_shared(self, name: str, value: str, item: ArrivingItem, nbytes: int) -> LoadResult:
        """A large one in a thread, which ends before this does: it writes into the caller's memory."""
        if nbytes < _SMALL_BYTES:
            return await self._get(StoreAddress(path=f"\0{name}"), value, item, nbytes)
        stop = Event()
        reading = asyncio.ensure_future(asyncio.to_thread(_read_segment, name, value, item, stop))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.exception()
            raise

    async def _read_peer(self, address: str, value: str, item: ArrivingItem, nbytes: int) -> LoadResult:
        host, _, port = address.rpartition(":")
        place = StoreAddress(host=host.strip("[]"), port=int(port), password=self._token, tls=self._tls)
        return await self._get(place, value, item, nbytes)

    async def _get(self, place: StoreAddress, value: str, item: ArrivingItem, nbytes: int) -> LoadResult:
        reader = await self._connected(place)
        async with asyncio.timeout(ANSWER_SECONDS + nbytes / SLOWEST):
            received = await reader.get(value, item.begin, item.feed)
        idle = self._idle.setdefault(place.label, [])
        if len(idle) < _IDLE:
            idle.append(reader)
        else:
            reader.close()
        return Missing("it is not served any more") if received is None else item.result()

    async def _connected(self, place: StoreAddress) -> BulkReader:
        idle = self._idle.get(place.label, [])
        while idle:
            if (reader := idle.pop()).usable:
                return reader
        # Encoder workers that have ended are not asked again.
        self._idle = {label: usable for label, readers in self._idle.items() if (usable := _usable(readers))}
        async with asyncio.timeout(CONNECT_SECONDS):
            return await BulkReader.open(place)


def _usable(readers: list[BulkReader]) -> list[BulkReader]:
    return [reader for reader in readers if reader.usable]


def _read_segment(name: str, value: str, item: ArrivingItem, stop: Event) -> LoadResult:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_SECONDS)
        sock.connect(f"\0{name}")
        if not same_user(sock):
            raise ConnectionRefusedError("the socket is another user's")
        sock.sendall(command("FD", value))
        line, fds, _, _ = socket.recv_fds(sock, 64, 1, socket.MSG_CMSG_CLOEXEC)
        if not fds:
            return Missing("it is not served any more")
        try:
            if not is_sealed(fds[0]):
                return Missing("the memory is not sealed")
            return _copied(fds[0], int(line[1:].strip() or b"0"), item, stop)
        finally:
            os.close(fds[0])


def _copied(fd: int, nbytes: int, item: ArrivingItem, stop: Event) -> LoadResult:
    """The value, copied into the item's memory and then checked: nobody can change it after that."""
    memory = item.begin(nbytes)
    filled = 0
    while filled < nbytes and not stop.is_set():
        count = os.preadv(fd, [memory.rest(filled)[:_PIECE]], filled)
        if not count:
            return Missing("the memory is too short")
        filled += count
        item.feed(filled)
    return item.result() if filled == nbytes else Missing("cancelled")
