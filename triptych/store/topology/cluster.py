"""A store that is a Redis Cluster: every key on the server that has its slot.

redis-py's RedisCluster is not used: it sends ASKING on another pooled connection than the command that it is
for, fails for a redirect to a server that it does not know and for a slot that no server has, closes the
connections of all commands at CLUSTERDOWN, must be allowed COMMAND, and does not read renewed TLS files. Bulk
transfers have to know the slots' servers in any case.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.typing import EncodableT

from triptych.base.errors import ConfigError
from triptych.store import keys
from triptych.store.bulk import (
    SLOWEST,
    BulkError,
    BulkNotServing,
    BulkRedirected,
    BulkRefused,
    ValueTooLarge,
)
from triptych.store.control import Commands, StoreRefused, StoreUnavailable
from triptych.store.topology.location import StoreLocation
from triptych.store.topology.topology import Exchange, Server, ServerPart, Topology, all_of

SLOTS = 16384
#: Numbers of shards that are tried: enough for a server with a hundredth of the slots.
_SHARDS = 1024

#: Commands whose second word is not a key.
_WITHOUT_KEYS = ("CLUSTER", "CONFIG", "FLUSHALL", "INFO", "KEYS", "PING")
#: Host and port of a server.
Place = tuple[str, int]


class SlotMap:
    """The owner of each slot, by host and port; slots that no server has are None."""

    def __init__(self, owners: Sequence[Place | None]) -> None:
        self._owners = [*owners, *[None] * (SLOTS - len(owners))]
        self._shards: dict[Place | None, int] = {}

    @classmethod
    def parse(cls, rows: Sequence[Sequence[object]], seed: str) -> SlotMap:
        """The map in a reply to CLUSTER SLOTS. A server without a host in it is the one that was `seed`.

        ValueError for another reply.
        """
        owners: list[Place | None] = [None] * SLOTS
        for row in rows:
            first, last, primary = row[:3]
            if not isinstance(first, int) or not isinstance(last, int) or not isinstance(primary, list):
                raise ValueError("no row of slots")
            host, port = primary[:2]
            text = host.decode() if isinstance(host, bytes) else ""
            owners[first : last + 1] = [(text or seed, int(port))] * (last + 1 - first)
        if len(owners) != SLOTS:
            raise ValueError("slots beyond the last one")
        return cls(owners)

    def owner(self, slot: int) -> Place | None:
        return self._owners[slot]

    def move(self, slot: int, place: Place) -> None:
        """The slot's owner is another one, as a MOVED reply says."""
        if 0 <= slot < SLOTS:
            self._owners[slot] = place

    def shard(self, slot: int) -> int:
        """The first number for which keys about a shard lie where this slot does."""
        place = self._owners[slot]
        if place not in self._shards or self.owner(_shard_slot(self._shards[place])) != place:
            numbers = (number for number in range(_SHARDS) if self.owner(_shard_slot(number)) == place)
            self._shards[place] = next(numbers, 0)
        return self._shards[place]

    def parts(self) -> dict[Place, float]:
        """The part of all slots that each server has."""
        counts = Counter(owner for owner in self._owners if owner is not None)
        return {place: count / SLOTS for place, count in sorted(counts.items())}


def slot_of(key: str) -> int:
    """The slot of a key: of the tag in its braces, where it has one."""
    return int(key_slot(key.encode()))


@functools.cache
def _shard_slot(number: int) -> int:
    return slot_of(keys.usage(str(number), "", "")[0])


def key_of(args: Sequence[object]) -> str | None:
    """The first key of a command, as the store's commands are written; None for one without keys."""
    if args[0] == "EVAL":
        return str(args[3]) if args[2] else None
    return str(args[1]) if len(args) > 1 and args[0] not in _WITHOUT_KEYS else None


T = TypeVar("T")

#: Seconds between two readings of the slot map, and between tries while the servers do not agree.
_PAUSE = 0.05
#: Redirects that are followed at once: servers that point at each other have not agreed yet.
_QUICK_REDIRECTS = 4
#: Seconds after which a server without slots that nothing was sent to is disconnected.
_IDLE_SECONDS = 60.0
_NOT_SERVING = (ClusterDownError, MasterDownError, ReadOnlyError, TryAgainError)
#: A script's key that is not declared, a part of a large value, has not moved yet with its slot, or has.
_PARTLY_MOVED = "non local key"


class RedisCluster(Topology):
    """The servers of a Redis Cluster, found through some of them."""

    def __init__(self, location: StoreLocation, timeout: float) -> None:
        self.label = location.label
        self.control = _ClusterControl(self, timeout)
        self._timeout = timeout
        self._seeds = location.servers
        self._servers: dict[Place, Server] = {}
        self._used: dict[Place, float] = {}
        self._map = SlotMap([])
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def connect(self) -> None:
        await self._refresh()
        await self.control.execute("PING")

    async def on_owner(self, key: str, nbytes: int, exchange: Exchange[T]) -> T:
        async with asyncio.timeout(self._timeout + nbytes / SLOWEST):
            server, ask, redirects = await self.owner(key), False, 0
            while True:
                try:
                    return await exchange(server, ask)
                except BulkRedirected as error:
                    # A redirect without a host is to the host of the server that answers.
                    place = (error.host or server.address.host, error.port)
                    if not error.ask:
                        self._map.move(error.slot, place)
                    server, ask, redirects = self._server_at(place), error.ask, redirects + 1
                    await asyncio.sleep(_PAUSE if redirects > _QUICK_REDIRECTS else 0)
                except BulkNotServing:
                    await self._refresh()
                    server, ask = await self.owner(key), False
                except (BulkRefused, StoreRefused, ValueTooLarge):
                    raise
                except (BulkError, OSError, TimeoutError, StoreUnavailable):
                    await self._refresh(server)
                    failed, server, ask = server, await self.owner(key), False
                    if server is failed:
                        raise

    async def owner(self, key: str) -> Server:
        """The server that has the key's slot; StoreUnavailable when none has."""
        place = self._map.owner(slot_of(key))
        if place is None:
            await self._refresh()
            place = self._map.owner(slot_of(key))
        if place is None:
            raise StoreUnavailable(f"store {self.label}: no server has the slot {slot_of(key)}")
        return self._server_at(place)

    async def shard_of(self, key: str) -> str:
        await self.owner(key)
        return str(self._map.shard(slot_of(key)))

    def _server_at(self, place: Place) -> Server:
        """The connections to the server there."""
        if place not in self._servers:
            address = replace(self._seeds[0], host=place[0], port=place[1])
            self._servers[place] = Server(address, self._timeout)
        self._used[place] = time.monotonic()
        return self._servers[place]

    async def _refresh(self, failed: Server | None = None) -> None:
        """Reads the slot map from a server that answers, `failed` last. StoreUnavailable when none does."""
        requested_at = time.monotonic()
        async with self._reading:
            if self._read_at >= requested_at:
                return
            await asyncio.sleep(self._read_at + _PAUSE - time.monotonic())
            self._read_at = time.monotonic()
            places = [*self._map.parts(), *((seed.host, seed.port) for seed in self._seeds)]
            servers = [self._server_at(place) for place in dict.fromkeys(places)]
            servers.sort(key=lambda server: server is failed)
            reasons = []
            for server in servers:
                try:
                    rows = await server.control.execute("CLUSTER", "SLOTS")
                    self._map = SlotMap.parse(rows, server.address.host)
                except (StoreUnavailable, ValueError) as error:
                    if "cluster support disabled" in str(error):
                        raise ConfigError(
                            f"--store {self.label}: {server.address.label} is not a node of a Redis Cluster; "
                            "for a single server write redis://host:port/0"
                        ) from None
                    reasons.append(str(error))
                    continue
                await self._disconnect_idle()
                return
            raise StoreUnavailable("; ".join(reasons))

    async def _disconnect_idle(self) -> None:
        parts = self._map.parts()
        now = time.monotonic()
        for place in [place for place in self._servers if place not in parts]:
            if now - self._used[place] > _IDLE_SECONDS:
                await self._servers.pop(place).close()

    def servers(self) -> Sequence[ServerPart]:
        return [ServerPart(self._server_at(place), part) for place, part in self._map.parts().items()]

    @property
    def generation(self) -> str:
        return " ".join(f"{host}:{port}" for host, port in self._map.parts())

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()


class _ClusterControl(Commands):
    """Small commands: one round trip to each server that is concerned, all at once.

    Commands without a key go to the server that has the registry. Those that were redirected, or that a
    server did not serve, are sent again one after the other.
    """

    def __init__(self, cluster: RedisCluster, timeout: float) -> None:
        self._cluster = cluster
        self._timeout = timeout

    async def execute_all(self, commands: Sequence[Sequence[EncodableT]]) -> list[Any]:
        groups: dict[Server, list[int]] = {}
        replies: dict[int, Any] = {}
        try:
            async with asyncio.timeout(self._timeout):
                for index, args in enumerate(commands):
                    groups.setdefault(await self._cluster.owner(_key(args)), []).append(index)
                sent = [self._sent(server, [commands[i] for i in each]) for server, each in groups.items()]
                for indices, answers in zip(groups.values(), await all_of(sent), strict=True):
                    replies.update(zip(indices, answers, strict=True))
        except TimeoutError:
            raise StoreUnavailable(
                f"store {self._cluster.label} has not served {len(commands)} commands in {self._timeout:g} s"
            ) from None
        return [replies[index] for index in range(len(commands))]

    async def _sent(self, server: Server, commands: Sequence[Sequence[EncodableT]]) -> list[Any]:
        """The replies to commands that are sent to one server together."""
        try:
            replies = await server.control.replies(commands)
        except StoreUnavailable as error:
            replies = [error] * len(commands)
        for index, args in enumerate(commands):
            if isinstance(replies[index], Exception):
                replies[index] = await self._cluster.on_owner(_key(args), 0, partial(_one, args))
        return replies


def _key(args: Sequence[object]) -> str:
    return key_of(args) or keys.EPOCH


async def _one(args: Sequence[EncodableT], server: Server, ask: bool) -> object:
    """One command's reply. Raises what an error means for the command."""
    reply = (await server.control.replies([("ASKING",), args] if ask else [args]))[-1]
    if isinstance(reply, AskError):
        ask = not isinstance(reply, MovedError)
        raise BulkRedirected(reply.slot_id, reply.host, reply.port, ask=ask)
    if isinstance(reply, _NOT_SERVING) or (isinstance(reply, ResponseError) and _PARTLY_MOVED in str(reply)):
        raise BulkNotServing(str(reply))
    if isinstance(reply, Exception):
        raise server.control.refusal(reply)
    return reply
