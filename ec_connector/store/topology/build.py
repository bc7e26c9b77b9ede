"""Builds the topology of a store location."""

from __future__ import annotations

from triptych.ec_connector.store.topology.cluster import RedisCluster
from triptych.ec_connector.store.topology.location import Kind, StoreLocation
from triptych.ec_connector.store.topology.sentinel import SentinelPrimary
from triptych.ec_connector.store.topology.single import SingleServer
from triptych.ec_connector.store.topology.topology import Topology


def build_topology(location: StoreLocation, timeout: float) -> Topology:
    """The location's topology, not connected yet."""
    if location.kind is Kind.CLUSTER:
        return RedisCluster(location, timeout)
    if location.kind is Kind.SENTINEL:
        return SentinelPrimary(location, timeout)
    return SingleServer(location.servers[0], timeout)
