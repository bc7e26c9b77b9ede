"""A store that is a Redis Cluster: every key on the server that has its slot.

The slot map is one for small commands and bulk transfers. redis-py's own RedisCluster is not used: it sends
ASKING on another pooled connection than the command that it is for, fails for a redirect to a server that it
does not know yet, and closes the connections of all commands at CLUSTERDOWN.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from triptych.ec_connector.store.bulk import (
    SLOWEST,
    BulkError,
    BulkNotServing,
    BulkRedirected,
    BulkRefused,
    ValueTooLarge,
)
from triptych.ec_connector.store.bulk_reader import BulkReader
from triptych.ec_connector.store.bulk_writer import BulkWriter
from triptych.ec_connector.store.control import Commands, StoreUnavailable
from triptych.ec_connector.store.topology.cluster_control import ClusterControl
from triptych.ec_connector.store.topology.location import StoreLocation
from triptych.ec_connector.store.topology.server import Server
from triptych.ec_connector.store.topology.slots import Place, SlotMap, slot_of
from triptych.ec_connector.store.topology.topology import ServerPart, Topology
from triptych.errors import ConfigError

T = TypeVar("T")
C = TypeVar("C", BulkReader, BulkWriter)

#: Seconds between two tries while the cluster does not serve a slot.
_PAUSE = 0.05
#: Redirects in a row that are followed at once: servers that point at each other have not agreed yet.
_QUICK_TRIES = 4
#: Seconds that a slot map is taken for new after it was read.
_FRESH_SECONDS = 0.2
#: Seconds after which a server without slots that nothing was sent to is disconnected.
_IDLE_SECONDS = 60.0


class RedisCluster(Topology):
    """The servers of a Redis Cluster, found through some of them."""

    def __init__(self, location: StoreLocation, timeout: float) -> None:
        self.label = location.label
        self.timeout = timeout
        self.control: Commands = ClusterControl(self)
        self._seeds = location.servers
        self._servers: dict[Place, Server] = {}
        self._used: dict[Place, float] = {}
        self._map = SlotMap([])
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def connect(self) -> None:
        await self.refresh()
        await self.control.execute("PING")

    # The slot map

    async def owner(self, key: str) -> Server:
        """The server that has the key's slot; StoreUnavailable when none has."""
        place = self._map.owner(slot_of(key))
        if place is None:
            await self.refresh()
            place = self._map.owner(slot_of(key))
        if place is None:
            raise StoreUnavailable(f"store {self.label}: no server has the slot {slot_of(key)}")
        return self.server_at(place)

    def server_at(self, place: Place) -> Server:
        """The connections to the server there."""
        if place not in self._servers:
            address = replace(self._seeds[0], host=place[0], port=place[1])
            self._servers[place] = Server(address, self.timeout)
        self._used[place] = time.monotonic()
        return self._servers[place]

    def redirected(self, error: BulkRedirected, by: Server) -> Server:
        """The server that a redirect names; one without a host is the same host's."""
        place = (error.host or by.address.host, error.port)
        if not error.ask:
            self._map.move(error.slot, place)
        return self.server_at(place)

    async def refresh(self, failed: Server | None = None) -> None:
        """Reads the slot map from a server that answers, `failed` last. StoreUnavailable when none does."""
        async with self._reading:
            if time.monotonic() - self._read_at < _FRESH_SECONDS:
                return
            places = [*self._map.parts(), *((seed.host, seed.port) for seed in self._seeds)]
            servers = [self.server_at(place) for place in dict.fromkeys(places)]
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
                self._read_at = time.monotonic()
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
        return [ServerPart(self.server_at(place), part) for place, part in self._map.parts().items()]

    @property
    def generation(self) -> str:
        return " ".join(f"{host}:{port}" for host, port in self._map.parts())

    # Bulk transfers

    async def read(self, key: str, nbytes: int, use: Callable[[BulkReader], Awaitable[T]]) -> T:
        return await self._routed(
            key, nbytes, lambda server, ask: server.read(nbytes, _asking(use) if ask else use)
        )

    async def write(self, key: str, nbytes: int, use: Callable[[BulkWriter], Awaitable[T]]) -> T:
        return await self._routed(
            key, nbytes, lambda server, ask: server.write(nbytes, _asking(use) if ask else use)
        )

    async def _routed(self, key: str, nbytes: int, transfer: Callable[[Server, bool], Awaitable[T]]) -> T:
        """The transfer with the server that has the key, which redirects and failures may change."""
        async with asyncio.timeout(self.timeout + nbytes / SLOWEST):
            server, ask = await self.owner(key), False
            for tries in itertools.count():
                try:
                    return await transfer(server, ask)
                except BulkRedirected as error:
                    server, ask = self.redirected(error, server), error.ask
                    await asyncio.sleep(_PAUSE if tries > _QUICK_TRIES else 0)
                except BulkNotServing:
                    await asyncio.sleep(_PAUSE)
                    await self.refresh()
                    server, ask = await self.owner(key), False
                except (BulkRefused, ValueTooLarge):
                    raise
                except (BulkError, OSError, TimeoutError):
                    other = await self.other_owner(key, server)
                    if other is None:
                        raise
                    server, ask = other, False
        raise AssertionError("unreachable")

    async def other_owner(self, key: str, failed: Server) -> Server | None:
        """The server that has the key now, unless that is still the one that failed."""
        await self.refresh(failed)
        server = await self.owner(key)
        return None if server is failed else server

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()


def _asking(use: Callable[[C], Awaitable[T]]) -> Callable[[C], Awaitable[T]]:
    """The exchange after ASKING, on the same connection."""

    async def after_asking(connection: C) -> T:
        await connection.asking()
        return await use(connection)

    return after_asking
