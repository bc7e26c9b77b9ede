"""The embedding store: encoder outputs by mm_hash, each written once and verified when read."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from triptych.base.errors import ConfigError
from triptych.base.log import log_fields, short
from triptych.base.types import ItemPlan
from triptych.store import codec, control, keys
from triptych.store.bulk import (
    POLICY,
    BulkError,
    BulkNotServing,
    BulkRefused,
    BulkWriter,
    Loaded,
    LoadResult,
    Missing,
    Received,
    SaveResult,
    ScatterBuffer,
    StoreMemory,
    ValueTooLarge,
    combined,
    scattered,
)
from triptych.store.bulk_reader import ArrivingValue, BulkReader, Into, Progress, behind_a_head
from triptych.store.codec import Buffer, Damage, Head
from triptych.store.control import ServerClock, StoreFull, StoreRefused, StoreUnavailable
from triptych.store.remedies import has_remedy, is_denied, with_remedy
from triptych.store.shares import StoreShares
from triptych.store.topology.cluster import RedisCluster
from triptych.store.topology.location import Kind, StoreLocation, parse_store
from triptych.store.topology.sentinel import SentinelPrimary
from triptych.store.topology.topology import SingleServer, Topology, all_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Checksums of more bytes run in a thread; xxhash releases the GIL.
_INLINE_BYTES = 1 << 20


class EmbeddingStore:
    """The client of the store, for one event loop. Created by `connect`.

    `control` is its client for small commands, `kind` the word before its values' keys. Methods raise
    StoreUnavailable when the store is down.
    """

    def __init__(self, location: StoreLocation, timeout: float, kind: str = keys.EMBEDDING) -> None:
        self._kind = kind
        self.topology = build_topology(location, timeout)
        self.label = self.topology.label
        self.control = self.topology.control
        self.shares = StoreShares(self.topology, self.control)
        self._clock = ServerClock()

    @classmethod
    async def connect(cls, url: str, *, timeout: float = 5.0, kind: str = keys.EMBEDDING) -> EmbeddingStore:
        """The store at the URL of --store; StoreUnavailable if it does not answer.

        `timeout` seconds bound every later command too. ConfigError for another URL.
        """
        store = cls(parse_store(url), timeout, kind)
        try:
            await store.topology.connect()
            await store._warn_of_policy()
        except BaseException:
            await store.close()
            raise
        return store

    async def _warn_of_policy(self) -> None:
        try:
            memory = await self.memory()
        except StoreUnavailable as error:
            logger.info("store %s does not report its memory policy: %s", self.label, error)
            return
        if memory.policy != POLICY:
            logger.warning(
                "store %s evicts by %s: set maxmemory-policy %s, or leases and registrations may be lost "
                "and writes refused",
                self.label,
                memory.policy,
                POLICY,
            )

    def _key(self, mm_hash: str) -> str:
        return keys.embedding(mm_hash, self._kind)

    async def close(self) -> None:
        """Closes all connections."""
        await self.shares.close()
        await self.topology.close()

    async def ping(self) -> bool:
        """Whether the store answers within the timeout. Never raises."""
        try:
            await self.control.execute("PING")
        except StoreUnavailable:
            return False
        return True

    async def look_up(self, keys_: Sequence[tuple[str, str]]) -> list[ItemPlan | None]:
        """Plans of the items stored under these (mm_hash, namespace), in order; renews their TTL.

        One round trip, headers only. None for a damaged value or one of another namespace. StoreUnavailable
        when the store is down.
        """
        if not keys_:
            return []
        grace = int(keys.PART_GRACE)
        heads = await self.control.execute_all(
            [("EVAL", control.LOOK_UP, 1, self._key(mm_hash), grace) for mm_hash, _ in keys_]
        )
        plans: list[ItemPlan | None] = []
        for (mm_hash, namespace), raw in zip(keys_, heads, strict=True):
            head = codec.decode_head(raw, mm_hash=mm_hash, namespace=namespace)
            plans.append(head.plan if isinstance(head, Head) else None)
        return plans

    async def save(
        self,
        plan: ItemPlan,
        body: memoryview | bytes,
        *,
        ttl: float,
        damaged_digest: str = "",
        head: bytes = b"",
        tenant: str = "",
    ) -> SaveResult:
        """Stores the item; if it is stored already, only renews its TTL.

        A `tenant`, by its digest, first makes room where it has more than its share of a store that is full.

        `damaged_digest` names a damaged value to replace; a value that no longer matches it is kept.
        `head` is the value's, from `codec.encode_head`, where the caller has made it already.
        InvalidRequest when the plan does not fit body or header, StoreFull and StoreUnavailable else.
        """
        key = self._key(plan.mm_hash)
        await self.shares.take(tenant, plan.mm_hash, plan.nbytes, ttl)
        body = memoryview(body).cast("B") if len(body) else memoryview(b"")
        head = head or await _off_loop(len(body), lambda: codec.encode_head(plan, body, ttl=ttl))
        write_id = codec.write_id_of(head)
        dropped = bool(damaged_digest) and await self.control.script(
            control.DROP_DAMAGED, [key], damaged_digest
        )
        milliseconds = int(ttl * 1000)
        value: list[Buffer] = [head, body]
        parts = self._parts_of(plan.mm_hash, write_id, body)
        if parts:
            value = [head]
            for name, piece in parts:
                await self._set(name, [piece], milliseconds + int(keys.PART_GRACE * 1000), only_new=False)
        if await self._set(key, value, milliseconds) or (
            parts and not await self._delete_parts(key, write_id, parts)
        ):
            return SaveResult.REPLACED if dropped else SaveResult.STORED
        await self.control.execute_all([("EVAL", control.LOOK_UP, 1, key, int(keys.PART_GRACE))])
        return SaveResult.ALREADY

    def _parts_of(self, mm_hash: str, write_id: str, body: memoryview) -> list[tuple[str, memoryview]]:
        size = codec.PART_BYTES
        return [
            (keys.part(mm_hash, write_id, index, self._kind), body[index * size : (index + 1) * size])
            for index in range(codec.part_count(len(body)))
        ]

    async def _delete_parts(self, key: str, write_id: str, parts: Sequence[tuple[str, memoryview]]) -> bool:
        """Deletes the parts of a write unless its own header is stored; whether they were deleted."""
        names = [name for name, _ in parts]
        return bool(await self.control.script(control.DELETE_PARTS, [key, *names], write_id))

    async def _set(
        self, key: str, value: Sequence[Buffer], milliseconds: int, *, only_new: bool = True
    ) -> bool:
        nbytes = sum(len(piece) for piece in value)

        async def write(writer: BulkWriter) -> bool:
            return await writer.set(key, value, milliseconds=milliseconds, only_new=only_new)

        try:
            return await self._reached(self.topology.write(key, nbytes, write))
        except BulkRefused as error:
            if str(error).startswith("the store answered OOM"):
                raise StoreFull(
                    f"store {self.label} has no room for {nbytes} bytes and nothing to evict: raise its "
                    f"maxmemory, and set maxmemory-policy {POLICY}"
                ) from error
            raise StoreRefused(f"store {self.label} refused a value: {with_remedy(error)}") from error

    async def load(self, plan: ItemPlan, into: Into) -> LoadResult:
        """The item's verified body, received into the memory from `into(plan.nbytes)`.

        `into` may be called again after a broken connection. A value that is absent, damaged, or of another
        plan is Missing, never an exception; StoreUnavailable when the store is down.
        """
        key = self._key(plan.mm_hash)
        split = codec.part_count(plan.nbytes) > 0
        max_bytes = codec.HEAD_BYTES + (0 if split else plan.nbytes)
        arriving: list[ArrivingValue] = []
        body: list[Received] = []

        def begin(nbytes: int) -> ScatterBuffer:
            body[:] = [into(plan.nbytes)] if not split and nbytes > plan.nbytes else []
            memory = behind_a_head(nbytes, body)
            arriving[:] = [ArrivingValue(memory, mm_hash=plan.mm_hash, namespace=plan.namespace)]
            return memory

        try:
            value = await self._get(key, max_bytes, begin, lambda filled: arriving[0].feed(filled))
        except (ValueTooLarge, BulkRefused) as error:
            return Missing(str(error), await self._digest_of(key))
        if value is None:
            return Missing("no such key")
        head = _fitting(plan, arriving[0].result())
        if isinstance(head, Damage):
            return Missing(head.reason, codec.damage_digest(scattered(value).read(0, codec.HEAD_BYTES)))
        return await self._load_parts(plan, head, into) if split else Loaded(body[0], head.producer)

    async def _load_parts(self, plan: ItemPlan, head: Head, into: Into) -> LoadResult:
        digest = codec.damage_digest(head.raw)
        memory = into(plan.nbytes)
        body = scattered(memory)
        for index in range(head.parts):
            start = index * codec.PART_BYTES
            piece = ScatterBuffer(list(body.between(start, start + codec.PART_BYTES)))
            try:
                part = await self._get(
                    keys.part(plan.mm_hash, head.write_id, index, self._kind), len(piece), _exactly(piece)
                )
            except (ValueTooLarge, BulkRefused) as error:
                return Missing(f"a part is damaged: {error}", digest)
            if part is None:
                return Missing("a part is gone", digest)
        damage = await _off_loop(len(body), lambda: codec.verify(head, body.pieces))
        return Loaded(memory, head.producer) if damage is None else Missing(damage.reason, digest)

    async def _get(
        self, key: str, max_bytes: int, into: Into, progress: Progress | None = None
    ) -> Received | None:
        def checked(nbytes: int) -> Received:
            if nbytes > max_bytes:
                raise ValueTooLarge(f"the value has {nbytes} bytes, at most {max_bytes} were expected")
            return into(nbytes)

        async def read(reader: BulkReader) -> Received | None:
            return await reader.get(key, checked, progress)

        return await self._reached(self.topology.read(key, max_bytes, read))

    async def _reached(self, transfer: Awaitable[T]) -> T:
        """The bulk transfer's result; StoreUnavailable when no server can be reached for it."""
        try:
            return await transfer
        except BulkNotServing as error:
            raise StoreUnavailable(f"store {self.label} does not serve now: {error}") from error
        except (ValueTooLarge, BulkRefused) as error:
            if is_denied(error):
                raise StoreRefused(f"store {self.label} refused a transfer: {with_remedy(error)}") from error
            raise
        except (BulkError, OSError, TimeoutError, ConfigError) as error:
            reason = with_remedy(error) or "the transfer stalled"
            raise StoreUnavailable(f"store {self.label} is not reachable: {reason}") from error

    async def _digest_of(self, key: str) -> str:
        """The digest of a value that could not be read; empty when it is gone or cannot be asked for.

        A key of another kind has no bytes: its digest is that of none.
        """
        try:
            raw = await self.control.execute("GETRANGE", key, 0, codec.HEAD_BYTES - 1)
        except StoreUnavailable as error:
            if isinstance(error, StoreRefused) and "WRONGTYPE" in str(error):
                return codec.damage_digest(b"")
            logger.warning("the digest of a damaged value cannot be read: %s", error)
            return ""
        return codec.damage_digest(raw) if raw else ""

    async def drop_damaged(self, mm_hash: str, damaged_digest: str) -> None:
        """Deletes the value that a load found to be damaged and named, so that a save stores it again.

        For readers that cannot have the item encoded again themselves. StoreUnavailable.
        """
        await self.control.script(control.DROP_DAMAGED, [self._key(mm_hash)], damaged_digest)

    async def memory(self) -> StoreMemory:
        """The byte budget of all servers. StoreUnavailable when one does not report it."""
        parts = self.topology.servers()
        memories = await all_of(each.server.memory() for each in parts)
        return combined([(memory, each.part) for memory, each in zip(memories, parts, strict=True)])

    async def epoch(self) -> str:
        """The epoch: a word that changes when the store is flushed, restarted, or has another server."""
        sent = time.monotonic()
        word, seconds, micros = await self.control.script(control.EPOCH, [keys.EPOCH], uuid.uuid4().hex)
        self._clock.answered(int(seconds) + int(micros) / 1e6, sent, time.monotonic())
        return self.epoch_with(word.decode())

    def epoch_with(self, word: str) -> str:
        """The epoch of which the store holds this word."""
        return " ".join(filter(None, (word, self.topology.generation)))

    @property
    def clock_jumps(self) -> int:
        """Jumps of the server's clock that calls of `epoch` have found so far."""
        return self._clock.jumps


def _fitting(plan: ItemPlan, head: Head | Damage) -> Head | Damage:
    if isinstance(head, Damage):
        return head
    if head.plan != plan:
        logger.warning(
            "item %s is stored with another plan than asked for",
            short(plan.mm_hash),
            extra=log_fields(mm_hash=plan.mm_hash),
        )
        return Damage("stored with another shape, dtype or grid than planned")
    return head


def _exactly(piece: ScatterBuffer) -> Into:
    def into(nbytes: int) -> Received:
        if nbytes != len(piece):
            raise ValueTooLarge(f"a part has {nbytes} bytes, not {len(piece)}")
        return piece

    return into


async def _off_loop(nbytes: int, work: Callable[[], T]) -> T:
    return work() if nbytes <= _INLINE_BYTES else await asyncio.to_thread(work)


async def connect_configured(url: str) -> EmbeddingStore:
    """The store of --store; ConfigError when it cannot be reached."""
    if not url:
        raise ConfigError("--store is missing: give the store's address, such as unix:///run/store.sock")
    try:
        return await EmbeddingStore.connect(url)
    except StoreUnavailable as error:
        # The error's address is without the password.
        remedy = "" if has_remedy(error) else ": start the store, or correct its address"
        raise ConfigError(f"--store cannot be used: {error}{remedy}") from error


def build_topology(location: StoreLocation, timeout: float) -> Topology:
    """The location's topology, not connected yet."""
    if location.kind is Kind.CLUSTER:
        return RedisCluster(location, timeout)
    if location.kind is Kind.SENTINEL:
        return SentinelPrimary(location, timeout)
    return SingleServer(location.servers[0], timeout)
