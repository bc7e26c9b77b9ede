"""Chunks of vLLM's KV cache as values of the store: looked up, saved and loaded beside vLLM's scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from triptych.base.errors import ConfigError, InternalError, TriptychError
from triptych.base.hashing import framed_digest
from triptych.base.types import ItemPlan
from triptych.ec_connector.connectors.store_client import StoreClient
from triptych.integrations.vllm.options import STORE_OPTIONS, store_of
from triptych.store import keys
from triptych.store.bulk import Loaded, Missing, SaveResult
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.kv_budget import KVBudget

logger = logging.getLogger(__name__)

_WHERE = "secondary_tiers"
#: Values that are saved, and loaded, at once.
_CONCURRENT = 8
#: Seconds that a look-up may take, and without any transfer after one has failed.
_LOOK_UP_SECONDS, _AWAY_SECONDS = 2.0, 5.0
#: Seconds in which all transfers are to end, and after that in which they are to be given up.
_DRAIN_SECONDS, _CANCEL_SECONDS = 30.0, 5.0
#: vLLM's scheduler knows no tenants: they have one count, and keys keep them apart.
_TENANT = ""

#: A chunk's memory in vLLM's primary tier.
Piece = memoryview
#: Moves one chunk; whether it is whole there.
Move = Callable[[ItemPlan, Piece], Awaitable[bool]]
#: Hears of a job's end, with the keys of what has been moved.
Ended = Callable[[list[bytes]], None]


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The options of one tier. `model_key` is a word that changes with the model's weights, `share` the part
    of the store's memory that KV blocks may take."""

    store: str = field(repr=False)
    model_key: str
    ttl_seconds: float = keys.EMBEDDING_TTL
    share: float = 0.25


def parse_tier(extra: Mapping[str, object]) -> TierOptions:
    """The checked options; ConfigError that names the option and the remedy."""
    known = (*STORE_OPTIONS, "model_key", "ttl_seconds", "kv_store_share")
    for name in sorted(set(extra) - set(known)):
        raise ConfigError(f"{_WHERE} has no option {name!r}: use {', '.join(known)}")
    model_key, ttl, share = (extra.get(name) for name in known[-3:])
    if not isinstance(model_key, str) or not model_key:
        raise ConfigError(
            f"{_WHERE} has no model_key: give a text that changes with the weights, like name and revision"
        )
    return TierOptions(
        store_of({name: extra[name] for name in STORE_OPTIONS if name in extra}, _WHERE),
        model_key,
        _number("ttl_seconds", ttl, keys.EMBEDDING_TTL, 1.0, 7 * 86400.0),
        _number("kv_store_share", share, 0.25, 0.01, 1.0),
    )


def _number(name: str, given: object, default: float, least: float, most: float) -> float:
    value = default if given is None else given
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(f"{_WHERE}: {name} must be a number from {least:g} to {most:g}, not {value!r}")
    return value


class KVChunks:
    """The chunks of one vLLM, each of `nbytes`; `layout` says all that their bytes depend on but the weights.

    A chunk that cannot be saved or loaded is computed again; after an error the store is left alone a while.
    """

    def __init__(self, options: TierOptions, layout: str, nbytes: int) -> None:
        if nbytes % 2:
            raise ConfigError(f"chunks of {nbytes} bytes cannot be stored: it must be an even number")
        self._options = options
        self._nbytes = nbytes
        self.namespace = framed_digest(
            (
                ("domain", b"triptych.vllm-kv.v1"),
                ("model_key", options.model_key.encode()),
                ("layout", layout.encode()),
                ("bytes", str(nbytes).encode()),
            )
        )
        self._client = StoreClient(options.store, kind=keys.KV)
        self._budget: KVBudget | None = None
        self._saves, self._loads = asyncio.Semaphore(_CONCURRENT), asyncio.Semaphore(_CONCURRENT)
        self._away_until = float("-inf")
        #: Jobs in the loop, and how many ends have not been told.
        self._jobs: set[asyncio.Task[list[bytes]]] = set()
        self._running = 0
        self._changed = threading.Condition()

    def close(self) -> None:
        """Ends all transfers: none writes into a piece from now on. Idempotent."""
        if not self._client.closed:
            self._client.closed = True
            self._client.close()

    def stored(self, chunk_keys: Sequence[bytes]) -> list[bool]:
        """Which of these chunks can be loaded; none while the store is away. Blocks, and never raises."""
        if time.monotonic() < self._away_until:
            return [False] * len(chunk_keys)
        try:
            return self._client.submit(self._stored(chunk_keys)).result()
        except (TriptychError, TimeoutError) as error:
            self._failed(error)
            return [False] * len(chunk_keys)

    async def _stored(self, chunk_keys: Sequence[bytes]) -> list[bool]:
        async with asyncio.timeout(_LOOK_UP_SECONDS):
            store, budget = await self._connected()
            plans = [self._plan(key) for key in chunk_keys]
            there = await store.look_up([(plan.mm_hash, plan.namespace) for plan in plans])
            found = [plan == other for plan, other in zip(plans, there, strict=True)]
            used = [(plan.mm_hash, plan.nbytes) for plan, good in zip(plans, found, strict=True) if good]
            if used:
                await budget.touch(_TENANT, used)
            return found

    def save(self, pieces: Mapping[bytes, Piece], ended: Ended) -> None:
        """Saves chunks; `ended` gets the keys of those that are stored, from another thread."""
        self._start(self._save, self._saves, pieces, ended)

    def load(self, pieces: Mapping[bytes, Piece], ended: Ended) -> None:
        """Loads chunks into their pieces; `ended` gets the keys of those that are whole there."""
        self._start(self._load, self._loads, pieces, ended)

    def _start(
        self, move: Move, slots: asyncio.Semaphore, pieces: Mapping[bytes, Piece], ended: Ended
    ) -> None:
        work = self._job(move, slots, pieces)

        def tell(done: Future[list[bytes]]) -> None:
            try:
                ended([] if done.cancelled() or done.exception() else done.result())
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify_all()

        with self._changed:
            self._running += 1
        try:
            self._client.submit(work).add_done_callback(tell)
        except TriptychError as error:
            failed = Future[list[bytes]]()
            failed.set_exception(error)
            tell(failed)

    def drain(self) -> None:
        """Waits until no transfer uses its memory any more, and the end of every job has been reported.

        After `_DRAIN_SECONDS` those left are cancelled: what they would have moved is computed again.
        InternalError where they cannot be.
        """
        if self._wait(_DRAIN_SECONDS):
            return
        logger.warning("KV chunks still move after %g s: they are given up", _DRAIN_SECONDS)
        # A part of a value fails its checksum, and a part of a piece is a load that has failed.
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._client.call_soon(self._cancel)
        if not self._wait(_CANCEL_SECONDS):
            raise InternalError("transfers of KV chunks do not end: restart this vLLM")

    def _cancel(self) -> None:
        for job in self._jobs:
            job.cancel()

    def _wait(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, seconds)

    async def _job(self, move: Move, slots: asyncio.Semaphore, pieces: Mapping[bytes, Piece]) -> list[bytes]:
        task = asyncio.current_task()
        assert task is not None
        self._jobs.add(task)
        try:
            return await self._all(move, slots, pieces)
        finally:
            self._jobs.discard(task)

    async def _all(self, move: Move, slots: asyncio.Semaphore, pieces: Mapping[bytes, Piece]) -> list[bytes]:
        async def one(key: bytes, piece: Piece) -> bool:
            async with slots:
                if time.monotonic() < self._away_until:
                    return False
                try:
                    return await move(self._plan(key), piece)
                except TriptychError as error:
                    self._failed(error)
                except Exception as error:
                    # The others of the job go on: it has not ended before they have.
                    logger.exception("a KV chunk could not be moved")
                    self._failed(InternalError(repr(error)))
                return False

        moved = await asyncio.gather(*(one(key, piece) for key, piece in pieces.items()))
        return [key for key, good in zip(pieces, moved, strict=True) if good]

    async def _save(self, plan: ItemPlan, piece: Piece) -> bool:
        store, budget = await self._connected()
        if await store.look_up([(plan.mm_hash, plan.namespace)]) == [plan]:
            return True
        ttl = self._options.ttl_seconds
        if not await budget.take(_TENANT, plan.mm_hash, plan.nbytes, ttl):
            return False
        return await store.save(plan, piece, ttl=ttl) is not SaveResult.ALREADY

    async def _load(self, plan: ItemPlan, piece: Piece) -> bool:
        store, _ = await self._connected()
        result = await store.load(plan, lambda nbytes: piece)
        if isinstance(result, Missing) and result.damaged_digest:
            await store.drop_damaged(plan.mm_hash, result.damaged_digest)
        return isinstance(result, Loaded)

    async def _connected(self) -> tuple[EmbeddingStore, KVBudget]:
        store = await self._client.store()
        if self._budget is None:
            self._budget = KVBudget(store.topology, store.control, self._options.share)
        return store, self._budget

    def _plan(self, key: bytes) -> ItemPlan:
        name = framed_digest((("namespace", self.namespace.encode()), ("key", key)))
        # The store knows no bytes: two of them are a number.
        return ItemPlan(name, self.namespace, "kv", 1, self._nbytes // 2, "float16", 0)

    def _failed(self, error: BaseException) -> None:
        if time.monotonic() > self._away_until:
            logger.warning("KV chunks are left alone for %g s: %s", _AWAY_SECONDS, error or repr(error))
        self._away_until = time.monotonic() + _AWAY_SECONDS
