"""Sentinels and servers that can be cut off from each other, while clients reach all of them.

Each side of the later split logs in to servers and Sentinels as a user of its own. Without that user a peer
is not answered, as if the network between them had gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.stores.sentinels import NAME
from support.stores.server import StoreServer, eventually

PASSWORD = "hush"
#: The side of the first primary and the first Sentinel, and that of all others.
SIDES = ("minority", "majority")


class SplitServers:
    """A primary and a Sentinel on one side; a replica and two Sentinels on the other."""

    def __init__(self, folder: Path, binary: str) -> None:
        self.servers = [
            StoreServer(
                folder / side,
                binary,
                password=PASSWORD,
                repl_diskless_sync_delay=0,
                masteruser=side,
                masterauth=side,
            )
            for side in SIDES
        ]
        self.sentinels = [
            StoreServer(folder / f"sentinel-{index}", binary, config=self._config(side), password=PASSWORD)
            for index, side in enumerate((SIDES[0], SIDES[1], SIDES[1]))
        ]

    def _config(self, side: str) -> str:
        lines = [
            f"sentinel monitor {NAME} 127.0.0.1 {self.servers[0].port} 2",
            f"sentinel down-after-milliseconds {NAME} 500",
            f"sentinel failover-timeout {NAME} 2000",
            f"sentinel auth-user {NAME} {side}",
            f"sentinel auth-pass {NAME} {side}",
            f"sentinel sentinel-user {side}",
            f"sentinel sentinel-pass {side}",
            f"user default on >{PASSWORD} ~* &* +@all",
            *(f"user {name} on >{name} ~* &* +@all" for name in SIDES),
        ]
        return "\n".join(lines) + "\n"

    @property
    def url(self) -> str:
        """The Sentinel that will be cut off comes first."""
        places = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://:{PASSWORD}@{places}/{NAME}"

    def start(self) -> None:
        for server in self.servers:
            server.start()
            for side in SIDES:
                self._admit(server, side)
        old, new = self.servers
        new.call("REPLICAOF", "127.0.0.1", old.port)
        eventually("the replica", lambda: new.call("INFO", "replication")["master_link_status"] == "up")
        for sentinel in self.sentinels:
            sentinel.start()
        eventually("the Sentinels", lambda: all(map(self._knows_all, self.sentinels)))

    def split(self) -> None:
        """Neither side answers the other one from now on."""
        for peers, other in self._peers():
            for peer in peers:
                peer.call("ACL", "DELUSER", other)

    def heal(self) -> None:
        for peers, other in self._peers():
            for peer in peers:
                self._admit(peer, other)

    def named_by(self, sentinel: StoreServer) -> int:
        """The port of the primary that the Sentinel names."""
        return int(sentinel.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)[1])

    def stop(self) -> None:
        for process in (*self.sentinels, *self.servers):
            process.kill()

    def _peers(self) -> list[tuple[list[StoreServer], str]]:
        return [
            ([self.servers[0], self.sentinels[0]], SIDES[1]),
            ([self.servers[1], *self.sentinels[1:]], SIDES[0]),
        ]

    @staticmethod
    def _admit(peer: StoreServer, side: str) -> None:
        peer.call("ACL", "SETUSER", side, "on", f">{side}", "~*", "&*", "+@all")

    @staticmethod
    def _knows_all(sentinel: StoreServer) -> bool:
        others = sentinel.call("SENTINEL", "SENTINELS", NAME)
        return len(others) == 2 and len(sentinel.call("SENTINEL", "REPLICAS", NAME)) == 1


@contextmanager
def split_servers(folder: Path, binary: str) -> Iterator[SplitServers]:
    """Servers and Sentinels for the length of a `with`, not split yet."""
    servers = SplitServers(folder, binary)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()
