"""The topology of a store location: one server, Sentinel's primary or a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from triptych.base.errors import ConfigError
from triptych.store.address import StoreAddress
from triptych.store.bulk import BulkNotServing
from triptych.store.control import StoreUnavailable
from triptych.store.topology.cluster import RedisCluster
from triptych.store.topology.location import Kind, StoreLocation
from triptych.store.topology.sentinel import SentinelPrimary
from triptych.store.topology.server import Server
from triptych.store.topology.topology import Exchange, ServerPart, Topology

T = TypeVar("T")


class SingleServer(Topology):
    """One server, whose name is resolved at every connect."""

    def __init__(self, address: StoreAddress, timeout: float) -> None:
        self.label = address.label
        self._server = Server(address, timeout)
        self.control = self._server.control

    async def connect(self) -> None:
        await self.control.execute("PING")
        try:
            info = await self._server.info("cluster")
        except StoreUnavailable:
            return
        if info.get("cluster_enabled") == "1":
            raise ConfigError(
                f"--store {self.label} is a node of a Redis Cluster: write redis+cluster://host:port"
            )

    async def on_owner(self, key: str, nbytes: int, exchange: Exchange[T]) -> T:
        try:
            return await exchange(self._server, False)
        except BulkNotServing:
            # A replica now: its name may be another's, which a fresh connection finds.
            self._server.drop_idle()
            return await exchange(self._server, False)

    def servers(self) -> Sequence[ServerPart]:
        return [ServerPart(self._server, 1.0)]

    async def close(self) -> None:
        await self._server.close()


def build_topology(location: StoreLocation, timeout: float) -> Topology:
    """The location's topology, not connected yet."""
    if location.kind is Kind.CLUSTER:
        return RedisCluster(location, timeout)
    if location.kind is Kind.SENTINEL:
        return SentinelPrimary(location, timeout)
    return SingleServer(location.servers[0], timeout)
