"""The stores that are compared, of Debian's Redis on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.store_scale.relay import start_relay

ONE = "1 server"
TLS = "1 server, TLS"
CLUSTER = "Redis Cluster of 3"
SHARDS = (1, 2, 4)


def sharded(count: int, limited: bool = False) -> str:
    """The name of an arrangement of so many shards."""
    name = ONE if count == 1 else f"{count} shards"
    return f"{name}, limited" if limited else name


@contextlib.contextmanager
def arrangements(folder: Path, limit: float) -> Iterator[dict[str, str]]:
    """The value of --store by the arrangement's name; relays let `limit` bytes per second through."""
    from support.processes.authority import Authority
    from support.processes.cluster import free_port
    from support.stores.redis_cluster import redis_cluster
    from support.stores.server import StoreServer
    from support.tools import tool
    from triptych.ec_connector.store.topology.location import with_tls_files

    binary = tool("redis-server")
    with contextlib.ExitStack() as stack:
        servers = [StoreServer(folder / f"shard-{n}", binary, maxmemory="512mb") for n in range(SHARDS[-1])]
        authority, tls_port = Authority(folder / "tls"), free_port()
        certificate, key = authority.issue("server", "127.0.0.1")
        encrypted = StoreServer(
            folder / "encrypted",
            binary,
            maxmemory="512mb",
            tls_port=tls_port,
            tls_cert_file=certificate,
            tls_key_file=key,
            tls_ca_cert_file=authority.ca_file,
        )
        for server in (*servers, encrypted):
            stack.callback(server.kill)
            server.start()
        cluster = stack.enter_context(redis_cluster(folder / "cluster", binary=binary))
        for node in cluster.nodes:
            node.call("CONFIG", "SET", "maxmemory", "512mb")
        relays = [start_relay(server.port, limit) for server in servers]
        for process, _ in relays:
            stack.callback(process.terminate)
        tls = with_tls_files(f"rediss://127.0.0.1:{tls_port}/0", authority.client())
        made = {ONE: servers[0].url, TLS: tls, CLUSTER: cluster.url}
        for count in SHARDS:
            made[sharded(count)] = " ".join(server.url for server in servers[:count])
            made[sharded(count, limited=True)] = " ".join(
                f"redis://127.0.0.1:{port}/0" for _, port in relays[:count]
            )
        yield made
