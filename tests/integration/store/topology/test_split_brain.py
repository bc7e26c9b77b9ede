"""Two primaries at once, on Debian's Redis: the old one is cut off, and clients can write to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.data.items import fresh_buffer, make_body, make_plan
from support.stores.sentinels import NAME
from support.stores.server import StoreServer, eventually
from support.stores.traffic import Traffic
from support.tools import tool
from support.waiting import until
from triptych.base.types import WorkerInfo
from triptych.registry.registry import Heartbeat, Registry
from triptych.store.bulk import Loaded, Missing
from triptych.store.embedding_store import EmbeddingStore

pytestmark = pytest.mark.slow


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


WORKER = WorkerInfo("h:1", "encoder", "i", "k", "m")


@pytest.fixture
def split(tmp_path: Path) -> Iterator[SplitServers]:
    with split_servers(tmp_path / "split", tool("redis-server")) as servers:
        yield servers


async def test_clients_follow_the_new_primary_although_the_old_one_answers_and_takes_writes(split):
    old, new = split.servers
    writer, reader = [await EmbeddingStore.connect(split.url) for _ in range(2)]
    # A client of the old side, which knows no Sentinel.
    stale = await EmbeddingStore.connect(old.url.replace("://", f"://:{PASSWORD}@"))
    heartbeat = Heartbeat(Registry(writer), WORKER, interval=0.1)
    heartbeat.start()
    before, lost = make_plan("before the split"), make_plan("on the old side")
    try:
        await writer.save(before, make_body(before), ttl=600)
        await until(lambda: new.call("DBSIZE") == old.call("DBSIZE"), "the replica to have it")
        epoch = await reader.epoch()
        async with Traffic(writer, reader) as traffic:
            await asyncio.to_thread(split.split)
            majority = split.sentinels[1:]
            await asyncio.to_thread(
                eventually, "a new primary", lambda: {*map(split.named_by, majority)} == {new.port}
            )
            assert split.named_by(split.sentinels[0]) == old.port, "its Sentinel stays with it"
            assert _role(old) == _role(new) == "master"
            await until(lambda: _port(writer) == _port(reader) == new.port, "all on the new primary")
            await stale.save(lost, make_body(lost), ttl=600)
            assert isinstance(await stale.load(lost, fresh_buffer), Loaded), "the old one takes writes"
            assert isinstance(await reader.load(lost, fresh_buffer), Missing), "which are misses elsewhere"
            assert isinstance(await reader.load(before, fresh_buffer), Loaded)
            assert await reader.epoch() != epoch, "it is another server"
            await traffic.more(120)
            assert _port(writer) == _port(reader) == new.port, "nor do they go back"
            await asyncio.to_thread(new.call, "DEL", "{registry}:workers")
            await until_registered(reader)

            await asyncio.to_thread(split.heal)
            await asyncio.to_thread(eventually, "the old one to be a replica", lambda: _role(old) == "slave")
            await traffic.more(120)
            assert isinstance(await reader.load(lost, fresh_buffer), Missing)
            await until_registered(reader)
            assert not traffic.wrong
    finally:
        await heartbeat.stop()
        for store in (writer, reader, stale):
            await store.close()


async def test_a_client_that_begins_during_the_split_is_led_to_the_new_primary(split: SplitServers) -> None:
    await asyncio.to_thread(split.split)
    new = split.servers[1]
    await asyncio.to_thread(
        eventually, "a new primary", lambda: {*map(split.named_by, split.sentinels[1:])} == {new.port}
    )
    store = await EmbeddingStore.connect(split.url)
    try:
        assert _port(store) == new.port
    finally:
        await store.close()


async def until_registered(store: EmbeddingStore) -> None:
    """Returns once the worker's registration is in the store."""
    async with asyncio.timeout(20):
        while not (await Registry(store).poll("p")).workers:
            await asyncio.sleep(0.02)


def _role(server: object) -> str:
    return str(server.call("INFO", "replication")["role"])  # type: ignore[attr-defined]


def _port(store: EmbeddingStore) -> int:
    (part,) = store.topology.servers()
    return part.server.address.port
