"""Builds the topology of a store location."""

from __future__ import annotations

from triptych.store.topology.cluster import RedisCluster
from triptych.store.topology.location import Kind, StoreLocation
from triptych.store.topology.sentinel import SentinelPrimary
from triptych.store.topology.single import SingleServer
from triptych.store.topology.topology import Topology


def build_topology(location: StoreLocation, timeout: float) -> Topology:
    """The location's topology, not connected yet."""
    if location.kind is Kind.CLUSTER:
        return RedisCluster(location, timeout)
    if location.kind is Kind.SENTINEL:
        return SentinelPrimary(location, timeout)
    return SingleServer(location.servers[0], timeout)
