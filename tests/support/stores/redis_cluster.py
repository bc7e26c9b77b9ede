"""A real Redis Cluster on loopback, whose slots move and whose nodes are killed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.processes.cluster import free_port
from support.stores.server import StoreServer, eventually

SLOTS = 16384


def cluster_node(folder: Path, binary: str = "", **options: Any) -> StoreServer:
    """A server that may be a node of a cluster, not started."""
    return StoreServer(
        folder,
        binary,
        cluster_enabled="yes",
        cluster_config_file="nodes.conf",
        cluster_port=free_port(),
        cluster_node_timeout=1000,
        cluster_require_full_coverage="no",
        repl_diskless_sync_delay=0,
        **options,
    )


class ClusterServers:
    """`primaries` nodes with slots, in equal parts, and for each of them `replicas` replicas."""

    def __init__(self, folder: Path, primaries: int = 3, replicas: int = 0, binary: str = "", **options: Any):
        nodes = [
            cluster_node(folder / f"node-{index}", binary, **options)
            for index in range(primaries * (1 + replicas))
        ]
        self.primaries, self.replicas = nodes[:primaries], nodes[primaries:]

    @property
    def nodes(self) -> list[StoreServer]:
        return [*self.primaries, *self.replicas]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:3])

    def start(self) -> None:
        """Starts all nodes and waits until they agree on who has which slots."""
        for number, node in enumerate(self.nodes):
            node.start()
            node.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            self._meet(node)
        each = -(-SLOTS // len(self.primaries))
        for number, node in enumerate(self.primaries):
            node.call("CLUSTER", "ADDSLOTSRANGE", number * each, min(SLOTS, (number + 1) * each) - 1)
        eventually("all nodes to know each other", lambda: all(self._known(node) for node in self.nodes))
        for number, replica in enumerate(self.replicas):
            primary = self.primaries[number % len(self.primaries)]
            replica.call("CLUSTER", "REPLICATE", node_id(primary))
        eventually("the cluster", lambda: all(self._agreed(node) for node in self.nodes))
        eventually("replicas", lambda: all(_is_synchronised(node) for node in self.replicas))

    def _meet(self, node: StoreServer) -> None:
        first = self.nodes[0]
        if node is not first:
            _, bus = first.call("CONFIG", "GET", "cluster-port")
            node.call("CLUSTER", "MEET", "127.0.0.1", first.port, bus)

    def _known(self, node: StoreServer) -> bool:
        return _info(node)["cluster_known_nodes"] == str(len(self.nodes))

    def _agreed(self, node: StoreServer) -> bool:
        rows = node.call("CLUSTER", "SLOTS")
        covered = sum(row[1] - row[0] + 1 for row in rows)
        replicas = sum(len(row) - 3 for row in rows)
        return covered == SLOTS and replicas == len(self.replicas) and _info(node)["cluster_state"] == "ok"

    def add(self, node: StoreServer) -> None:
        """Adds a started node, which has no slots yet."""
        self._meet(node)
        self.primaries.append(node)
        eventually("all to know the new node", lambda: all(self._known(each) for each in self.nodes))
        eventually("it to serve", lambda: _info(node)["cluster_state"] == "ok")

    def begin_move(self, slot: int, source: StoreServer, target: StoreServer) -> None:
        """The slot is being moved: what the source does not have is asked of the target."""
        target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))

    def move_keys(self, slot: int, source: StoreServer, target: StoreServer, maximum: int = SLOTS) -> int:
        """Moves keys of the slot, one after the other; how many."""
        names = source.call("CLUSTER", "GETKEYSINSLOT", slot, maximum)
        for name in names:
            source.call("MIGRATE", "127.0.0.1", target.port, name, 0, 10000)
        return len(names)

    def end_move(self, slot: int, target: StoreServer) -> None:
        """The slot is the target's."""
        for node in (target, *(each for each in self.primaries if each is not target)):
            node.call("CLUSTER", "SETSLOT", slot, "NODE", node_id(target))

    def move(self, slots: Iterable[int], source: StoreServer, target: StoreServer) -> None:
        """Moves slots with their keys, as `redis-cli --cluster reshard` does."""
        for slot in slots:
            self.begin_move(slot, source, target)
            self.move_keys(slot, source, target)
            self.end_move(slot, target)

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()


@contextmanager
def redis_cluster(
    folder: Path, primaries: int = 3, replicas: int = 0, binary: str = ""
) -> Iterator[ClusterServers]:
    """A cluster for the length of a `with`."""
    servers = ClusterServers(folder, primaries, replicas, binary)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()


def node_id(node: StoreServer) -> str:
    """The node's name in the cluster."""
    return str(node.call("CLUSTER", "MYID").decode())


def _info(node: StoreServer) -> dict[str, str]:
    lines = node.call("CLUSTER", "INFO").decode().splitlines()
    return dict(line.split(":", 1) for line in lines)


def _is_synchronised(node: StoreServer) -> bool:
    return bool(node.call("INFO", "replication")["master_link_status"] == "up")
