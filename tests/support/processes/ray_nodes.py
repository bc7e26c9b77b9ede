"""Ray for tests: nodes as processes of this machine, a store that they reach by TCP, and clusters on them."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from support.processes.cluster import Cluster, free_port, start_cluster, wait_for
from triptych.apps.launch.embedded_store import EmbeddedStore

#: Ray's own token stays out of the user's home, and nothing is reported.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}


class RayNodes:
    """The nodes of one Ray, and a store and a token file that all of them reach."""

    def __init__(self, folder: Path, cpus: int) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self._cluster: Any = RayCluster(
            initialize_head=True,
            head_node_args={"num_cpus": cpus, "include_dashboard": False, "object_store_memory": 80 << 20},
        )
        self.address = str(self._cluster.address)
        self.token_file = folder / "internal-token"
        self.token_file.write_text(secrets.token_hex(16))
        self.store = TcpStore(folder / "store")

    def add(self, cpus: int, **resources: float) -> Any:
        """A node more."""
        return self._cluster.add_node(num_cpus=cpus, resources=resources, object_store_memory=80 << 20)

    def kill(self, node: Any) -> None:
        """A node's machine fails: all its processes end at once."""
        self._cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        self._cluster.shutdown()
        self.store.stop()

    def words(self, *words: str) -> list[str]:
        """The options of `triptych serve` that run a cluster here."""
        return [
            *("--launcher", "ray", "--address", self.address, "--insecure"),
            *("--store", self.store.url, "--internal-token-file", str(self.token_file)),
            *words,
        ]

    def start_cluster(self, model: Path | None, run_dir: Path, *words: str) -> Cluster:
        """A cluster that answers."""
        return start_cluster(model, run_dir, *self.words(*words), environment={"TRIPTYCH_INTERNAL_TOKEN": ""})

    def refused(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`triptych serve` here with these words, run to its end."""
        return subprocess.run(
            [sys.executable, "-m", "triptych.apps.cli", "serve", *self.words(*words)],
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
        )

    @contextlib.contextmanager
    def driver(self, namespace: str = "tests") -> Iterator[Any]:
        """Ray, with this process as a driver of it."""
        import ray

        ray.init(self.address, namespace=namespace, logging_level="ERROR", log_to_driver=False)
        try:
            yield ray
        finally:
            ray.shutdown()

    def actors(self, cluster: str = "triptych") -> set[str]:
        """The names of the cluster's actors that live."""
        with self.driver() as ray:
            found = ray.util.list_named_actors(all_namespaces=True)
            return {one["name"] for one in found if one["namespace"] == f"triptych-{cluster}"}

    def groups(self) -> set[str]:
        """The names of the placement groups that are not removed."""
        with self.driver() as ray:
            rows = ray.util.placement_group_table().values()
            return {row["name"] for row in rows if row["state"] != "REMOVED"}


class TcpStore:
    """A store of its own at a port of loopback."""

    def __init__(self, folder: Path) -> None:
        self._server = EmbeddedStore(folder, 128 << 20)
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._start()

    def _start(self) -> None:
        self._server.start()
        with redis.Redis(unix_socket_path=self._server.url.removeprefix("unix://")) as client:
            client.config_set("bind", "127.0.0.1")
            client.config_set("port", self._port)

    def restart(self) -> None:
        """It comes back empty."""
        self.stop()
        self._start()

    def stop(self) -> None:
        self._server.stop()


@contextlib.contextmanager
def ray_nodes(folder: Path, cpus: int) -> Iterator[RayNodes]:
    """Ray with one node of `cpus` CPUs, its files and settings apart from the user's."""
    before = {name: os.environ.get(name) for name in (*ENVIRONMENT, "HOME", "RAY_TMPDIR")}
    os.environ.update(ENVIRONMENT | {"HOME": str(folder)})
    try:
        nodes = RayNodes(folder, cpus)
        try:
            yield nodes
        finally:
            nodes.stop()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def node_of(cluster: Cluster, name: str) -> int:
    """The process id of the actor whose service is `name`: the parent of the service."""
    pid = cluster.pid(name)
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def until_registered(cluster: Cluster, pool: str, count: int) -> None:
    """Waits until the pool has `count` live registrations."""
    wait_for(
        f"{count} registered {pool} workers",
        lambda: sum(worker.pool == pool for worker in cluster.workers()) == count,
    )
