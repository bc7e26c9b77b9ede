"""The embedding store: encoder outputs by mm_hash, on one shard or several."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from triptych.ec_connector.store import keys, scripts
from triptych.ec_connector.store.bulk_reader import Into
from triptych.ec_connector.store.control import StoreRefused, StoreUnavailable
from triptych.ec_connector.store.results import (
    POLICY,
    Loaded,
    LoadResult,
    Missing,
    SaveResult,
    StoreMemory,
    combined,
)
from triptych.ec_connector.store.shards.placement import ShardPlacement
from triptych.ec_connector.store.shards.search import Search
from triptych.ec_connector.store.shards.shard import Shard
from triptych.ec_connector.store.topology.build import build_topology
from triptych.ec_connector.store.topology.location import StoreLocation, parse_store
from triptych.ec_connector.store.topology.topology import all_of
from triptych.errors import ConfigError
from triptych.types import ItemPlan

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The epoch of a shard that is down.
_DOWN = "-"
#: What a process with one shard writes as its list of shards: its name does not place items.
_ALONE = "one"


class EmbeddingStore:
    """The client of the store, for one event loop. Created by `connect`.

    An item is on the shard that rendezvous of its mm_hash chooses; while that is down, on the next one. The
    first shard also holds registry, leases and scaling: `control` is its client for small commands.
    """

    def __init__(self, locations: Sequence[StoreLocation], timeout: float) -> None:
        self.label = " ".join(location.label for location in locations)
        self.shards = [Shard(build_topology(location, timeout)) for location in locations]
        self.control = self.shards[0].control
        self._names = [location.name for location in locations]
        self._placement = ShardPlacement(self._names, self.shards)
        self._memories: dict[Shard, StoreMemory] = {}
        self._epochs = [_DOWN] * len(self.shards)

    @classmethod
    async def connect(cls, url: str, *, timeout: float = 5.0) -> EmbeddingStore:
        """The store at the URL or URLs of --store; StoreUnavailable if its first shard does not answer.

        `timeout` seconds bound every later command too. ConfigError for another URL.
        """
        store = cls(parse_store(url), timeout)
        try:
            await all_of(map(store._connect, store.shards))
            await store._compare_shards()
        except BaseException:
            await store.close()
            raise
        return store

    async def _connect(self, shard: Shard) -> None:
        try:
            await shard.topology.connect()
        except StoreUnavailable as error:
            if shard is self.shards[0]:
                raise
            self._placement.failed(shard, error)
        else:
            await self._warn_of_policy(shard)

    async def _warn_of_policy(self, shard: Shard) -> None:
        try:
            memory = self._memories[shard] = await shard.memory()
        except StoreUnavailable as error:
            logger.info("store %s does not report its memory policy: %s", shard.label, error)
            return
        if memory.policy != POLICY:
            logger.warning(
                "store %s evicts by %s: set maxmemory-policy %s, or leases and registrations may be lost "
                "and writes refused",
                shard.label,
                memory.policy,
                POLICY,
            )

    async def _compare_shards(self) -> None:
        """Warns when the processes before this one were started with another list of shards."""
        ours = " ".join(sorted(self._names)) if len(self._names) > 1 else _ALONE
        try:
            known = (await self.control.script(scripts.SHARDS, [keys.SHARDS], ours)).decode(errors="replace")
        except StoreRefused as error:
            logger.info("the list of shards cannot be compared: %s", error)
            return
        if known != ours:
            logger.warning(
                "--store names the shards %s, an earlier process %s: until all have the same list, items are "
                "looked for where they are not, and encoded again",
                ours,
                known,
            )

    async def close(self) -> None:
        """Closes all connections."""
        await self._placement.close()
        await all_of(shard.close() for shard in self.shards)

    async def ping(self) -> bool:
        """Whether the first shard answers within the timeout. Never raises."""
        try:
            await self.control.execute("PING")
        except StoreUnavailable:
            return False
        return True

    async def look_up(self, keys_: Sequence[tuple[str, str]]) -> list[ItemPlan | None]:
        """Plans of the items stored under these (mm_hash, namespace), in order; renews their TTL.

        Headers only; one round trip to every shard, at once, and a second one for items that are not on
        their own. None for a damaged value or one of another namespace. StoreUnavailable when no shard
        answers for one of them.
        """
        if len(self.shards) == 1:
            return await self.shards[0].look_up(keys_)
        return await Search(self._placement, keys_).run()

    async def save(
        self,
        plan: ItemPlan,
        body: memoryview | bytes,
        *,
        ttl: float,
        damaged_digest: str = "",
        producer: bytes = b"",
    ) -> SaveResult:
        """Stores the item; if it is stored already, only renews its TTL.

        `damaged_digest` names a damaged value to replace; a value that no longer matches it is kept.
        `producer` is the trace context that goes with a stored value.
        InvalidRequest when the plan does not fit body or header, StoreFull and StoreUnavailable else.
        """
        tried: list[Shard] = []
        while True:
            shard = self._placement.candidates(plan.mm_hash)[0]
            tried.append(shard)
            try:
                return await shard.save(plan, body, ttl=ttl, damaged_digest=damaged_digest, producer=producer)
            except StoreRefused:
                raise
            except StoreUnavailable as error:
                self._placement.failed(shard, error)
                if self._placement.candidates(plan.mm_hash)[0] in tried:
                    raise

    async def load(self, plan: ItemPlan, into: Into) -> LoadResult:
        """The item's verified body, received into the memory from `into(plan.nbytes)`.

        `into` may be called again after a broken connection or a miss. A value that is absent, damaged, or of
        another plan is Missing, never an exception; StoreUnavailable when no shard answers.
        """
        tried: list[Shard] = []
        missing: Missing | None = None
        failure: StoreUnavailable | None = None
        while shard := self._placement.next_candidate(plan.mm_hash, tried):
            tried.append(shard)
            try:
                result = await shard.load(plan, into)
            except StoreUnavailable as error:
                self._placement.failed(shard, error)
                failure = error
                continue
            if isinstance(result, Loaded):
                return result
            missing = missing or result
        if missing is not None:
            return missing
        raise failure or StoreUnavailable(f"store {self.label} has no shard that answers")

    async def drop_damaged(self, mm_hash: str, damaged_digest: str) -> None:
        """Deletes the value that a load found to be damaged and named, so that a save stores it anew.

        For readers that cannot have the item encoded again themselves. StoreUnavailable.
        """
        key = keys.embedding(mm_hash)
        await all_of(
            shard.control.script(scripts.DROP_DAMAGED, [key], damaged_digest)
            for shard in self.shards
            if not self._placement.is_down(shard)
        )

    async def memory(self) -> StoreMemory:
        """The byte budget of all shards, by what is last known of one that is down.

        StoreUnavailable when none has reported it.
        """
        await self._of_all(self._read_memory)
        return combined([(memory, 1 / len(self.shards)) for memory in self._memories.values()])

    async def _read_memory(self, shard: Shard) -> StoreMemory:
        memory = self._memories[shard] = await shard.memory()
        return memory

    async def epoch(self) -> str:
        """The store's epoch: a word that changes when a shard is flushed, restarted, down or replaced."""
        self._epochs = [_DOWN if word is None else word for word in await self._of_all(Shard.epoch)]
        return " ".join(self._epochs)

    def epoch_with(self, word: str) -> str:
        """The epoch, where the first shard's word is this one and the others' are as last read."""
        return " ".join((self.shards[0].named(word), *self._epochs[1:]))

    async def _of_all(self, ask: Callable[[Shard], Awaitable[T]]) -> list[T | None]:
        """The answers of all shards, with None for one that is down; StoreUnavailable when all are."""
        errors: list[StoreUnavailable] = []

        async def answer(shard: Shard) -> T | None:
            if self._placement.is_down(shard):
                return None
            try:
                return await ask(shard)
            except StoreUnavailable as error:
                errors.append(error)
                if not isinstance(error, StoreRefused):
                    self._placement.failed(shard, error)
                return None

        answers = await all_of(map(answer, self.shards))
        if all(each is None for each in answers):
            raise errors[0] if errors else StoreUnavailable(f"store {self.label}: no shard answers")
        return answers

    @property
    def clock_jumps(self) -> int:
        """Jumps of the servers' clocks that calls of `epoch` have found so far."""
        return sum(shard.clock_jumps for shard in self.shards)


async def connect_configured(url: str) -> EmbeddingStore:
    """The store of --store; ConfigError when it cannot be reached."""
    if not url:
        raise ConfigError("--store is missing: give the store's address, such as unix:///run/store.sock")
    try:
        return await EmbeddingStore.connect(url)
    except StoreUnavailable as error:
        # The error's address is without the password.
        raise ConfigError(f"--store cannot be reached ({error}): start it, or correct the address") from error
