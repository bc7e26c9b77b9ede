"""Traces replayed on a server, in the model or for real, and the seconds of encoding again that they cost."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis

from benchmarks.store_eviction.server import EvictingServer
from benchmarks.store_eviction.trace import Item, Shape, Trace, typical_density
from triptych.launch.embedded_store import EmbeddedStore

#: TTLs by cost stay within this factor of the typical one.
_SPREAD = 16.0

#: The TTL of an item.
Ttl = Callable[[Item], float]


@dataclass(frozen=True, slots=True)
class Policy:
    """An eviction policy, and the TTL of a typical item. With volatile-ttl it grows with cost per byte."""

    name: str
    ttl: float = 3600.0

    def ttl_of(self, typical: float) -> Ttl:
        if self.name == "volatile-lru":
            return lambda item: self.ttl
        return lambda item: self.ttl * min(_SPREAD, max(1 / _SPREAD, item.seconds / item.nbytes / typical))

    def __str__(self) -> str:
        return self.name if self.name == "volatile-lru" else f"{self.name}, {self.ttl:g} s"


def reencoded(shape: Shape, part: float, policy: Policy, seed: int) -> float:
    """Seconds of encoding items again, with memory for this part of all items, in the model."""
    trace = Trace(shape, seed)
    ttl_of = policy.ttl_of(typical_density(trace.items))
    server = EvictingServer(int(trace.nbytes * part), policy.name, seed)
    seen: set[int] = set()
    again = 0.0
    for now, key in trace.requests():
        item = trace.items[key]
        ttl = ttl_of(item)
        if not server.look_up(key, now, ttl):
            again += item.seconds if key in seen else 0.0
            seen.add(key)
            server.save(key, item.nbytes, now, ttl)
    return again


def reencoded_for_real(shape: Shape, part: float, policy: Policy, seed: int, shrink: int) -> float:
    """As `reencoded`, on a real server: values `shrink` times smaller, in the trace's own time."""
    trace = Trace(shape, seed)
    ttl_of = policy.ttl_of(typical_density(trace.items))
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        store = EmbeddedStore(Path(folder), 1 << 30)
        store.start()
        try:
            with redis.Redis(unix_socket_path=store.url.removeprefix("unix://")) as client:
                # Memory of the server itself, before there is a key.
                empty = int(client.info("memory")["used_memory"])
                client.config_set("maxmemory-policy", policy.name)
                client.config_set("maxmemory", empty + int(trace.nbytes * part / shrink))
                return _replayed(client, trace, ttl_of, shrink)
        finally:
            store.stop()


def _replayed(client: redis.Redis, trace: Trace, ttl_of: Ttl, shrink: int) -> float:
    seen: set[int] = set()
    again, begin = 0.0, time.monotonic()
    for now, key in trace.requests():
        time.sleep(max(0.0, begin + now - time.monotonic()))
        item = trace.items[key]
        milliseconds = int(1000 * ttl_of(item))
        if not client.pexpire(str(key), milliseconds):
            again += item.seconds if key in seen else 0.0
            seen.add(key)
            client.set(str(key), bytes(item.nbytes // shrink), px=milliseconds)
    return again


def server_version() -> str:
    """The version of the server that `reencoded_for_real` starts."""
    from triptych.launch.embedded_store import find_server_binary

    said = subprocess.run(
        [str(find_server_binary()), "--version"], capture_output=True, text=True, check=True
    )
    return " ".join(said.stdout.split()[:3])
