"""A real primary with replicas, and Sentinels that watch it, on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.stores.server import StoreServer, eventually

NAME = "embeddings"


class WatchedServers:
    """One primary, its replicas, and Sentinels, which take half a second of silence for a failure."""

    def __init__(
        self,
        folder: Path,
        *,
        replicas: int = 1,
        sentinels: int = 3,
        binary: str = "",
        password: str = "",
        sentinel_password: str = "",
    ) -> None:
        self._folder = folder
        self._binary = binary
        self.servers = [
            StoreServer(folder / f"server-{index}", binary, password=password, repl_diskless_sync_delay=0)
            for index in range(1 + replicas)
        ]
        config = (
            f"sentinel monitor {NAME} 127.0.0.1 {self.servers[0].port} {sentinels // 2 + 1}\n"
            f"sentinel down-after-milliseconds {NAME} 500\n"
            f"sentinel failover-timeout {NAME} 2000\n"
        )
        if password:
            config += f"sentinel auth-pass {NAME} {password}\n"
        if sentinel_password:
            config += f"requirepass {sentinel_password}\nsentinel sentinel-pass {sentinel_password}\n"
        self.sentinels = [
            StoreServer(folder / f"sentinel-{index}", binary, config=config, password=sentinel_password)
            for index in range(sentinels)
        ]

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{places}/{NAME}"

    @property
    def primary(self) -> StoreServer:
        """The server that the Sentinels name."""
        _, port = self.sentinels[0].call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
        return next(server for server in self.servers if server.port == int(port))

    def start(self) -> None:
        """Starts all and waits until the replicas are synchronised and the Sentinels know each other."""
        for server in self.servers:
            server.start()
        for replica in self.servers[1:]:
            replica.call("REPLICAOF", "127.0.0.1", self.servers[0].port)
        eventually("replicas", lambda: all(map(self._is_synchronised, self.servers[1:])))
        for sentinel in self.sentinels:
            sentinel.start()
        eventually("the Sentinels", lambda: all(map(self._knows_all, self.sentinels)))

    def _is_synchronised(self, server: StoreServer) -> bool:
        return bool(server.call("INFO", "replication")["master_link_status"] == "up")

    def _knows_all(self, sentinel: StoreServer) -> bool:
        others = sentinel.call("SENTINEL", "SENTINELS", NAME)
        replicas = sentinel.call("SENTINEL", "REPLICAS", NAME)
        return len(others) == len(self.sentinels) - 1 and len(replicas) == len(self.servers) - 1

    def wait_for_failover(self, before: StoreServer) -> StoreServer:
        """The new primary, once a majority of the Sentinels names it."""
        eventually("a failover", lambda: self.primary is not before and _role(self.primary) == "master")
        return self.primary

    def stop(self) -> None:
        for process in (*self.sentinels, *self.servers):
            process.kill()


def _role(server: StoreServer) -> str:
    return str(server.call("INFO", "replication")["role"])


@contextmanager
def watched_servers(
    folder: Path, binary: str = "", password: str = "", sentinel_password: str = ""
) -> Iterator[WatchedServers]:
    """Servers and Sentinels for the length of a `with`."""
    servers = WatchedServers(folder, binary=binary, password=password, sentinel_password=sentinel_password)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()
