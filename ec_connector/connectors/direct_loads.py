"""Loads from the encoder worker that has the embedding: by shared memory, else over its data port."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from threading import Event

from triptych.base.log import log_fields, short
from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.ec_connector.base import DirectTransfer
from triptych.ec_connector.connectors.served_outputs import is_sealed
from triptych.store.bulk import SLOWEST, BulkError, Loaded, LoadResult, Missing, Received
from triptych.store.bulk_reader import ArrivingItem, BulkReader
from triptych.store.sockets import StoreAddress, command, same_user
from triptych.store.tls import StoreTls

logger = logging.getLogger(__name__)

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
