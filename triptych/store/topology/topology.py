"""Topologies of the store: what one server, Sentinel's primary and a cluster do, and their servers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject
from triptych.store.address import StoreAddress
from triptych.store.bulk import BulkError, BulkNotServing, BulkWriter, StoreMemory
from triptych.store.bulk_pool import BulkPool
from triptych.store.bulk_reader import BulkReader
from triptych.store.control import Commands, Control, StoreUnavailable

C = TypeVar("C", BulkReader, BulkWriter)

#: Bulk connections for reads, and for writes. More are not faster: one server thread answers them.
BULK_CONNECTIONS = 8


class Server:
    """The connections to one server, for one event loop."""

    def __init__(self, address: StoreAddress, timeout: float) -> None:
        self.address = address
        self.control = Control(address, timeout)
        self._readers = BulkPool(lambda: BulkReader.open(address), BULK_CONNECTIONS, timeout)
        self._writers = BulkPool(lambda: BulkWriter.open(address), BULK_CONNECTIONS, timeout)

    async def read(
        self, nbytes: int, use: Callable[[BulkReader], Awaitable[T]], *, asking: bool = False
    ) -> T:
        """One exchange of up to `nbytes`, after ASKING on the same connection where it is `asking`.

        BulkError, OSError or TimeoutError when it fails.
        """
        return await self._readers.transfer(nbytes, _after_asking(use) if asking else use)

    async def write(
        self, nbytes: int, use: Callable[[BulkWriter], Awaitable[T]], *, asking: bool = False
    ) -> T:
        """As `read`, on a connection for writes."""
        return await self._writers.transfer(nbytes, _after_asking(use) if asking else use)

    def drop_idle(self) -> None:
        """Closes idle bulk connections: the next transfers resolve the server's name again."""
        self._readers.drop_idle()
        self._writers.drop_idle()

    async def info(self, section: str) -> dict[str, str]:
        """A section of INFO. StoreUnavailable when the server does not report it."""
        fields: JsonObject = await self.control.execute("INFO", section)
        return {name: str(value) for name, value in fields.items()}

    async def memory(self) -> StoreMemory:
        """The server's byte budget. StoreUnavailable when it does not report it."""
        info, stats = await self.info("memory"), await self.info("stats")
        return StoreMemory(
            max_bytes=int(info.get("maxmemory", 0)),
            used_bytes=int(info.get("used_memory", 0)),
            policy=info.get("maxmemory_policy", ""),
            evicted_keys=int(stats.get("evicted_keys", 0)),
        )

    async def close(self) -> None:
        """Closes all connections."""
        self._readers.close()
        self._writers.close()
        await self.control.close()


def _after_asking(use: Callable[[C], Awaitable[T]]) -> Callable[[C], Awaitable[T]]:
    async def exchange(connection: C) -> T:
        await connection.asking()
        return await use(connection)

    return exchange


T = TypeVar("T")

#: An exchange with a server. True where ASKING comes first: the key's slot is being moved to that server.
Exchange = Callable[[Server, bool], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class ServerPart:
    """A server that holds values, and the part of all keys that are placed on it."""

    server: Server
    part: float


class Topology(ABC):
    """The store's servers, for one event loop. `label` names it without credentials."""

    label: str
    #: Small commands, each sent to the server that holds its first key.
    control: Commands

    @abstractmethod
    async def connect(self) -> None:
        """Finds the servers. StoreUnavailable when none answers, ConfigError for servers of another kind."""

    @abstractmethod
    async def on_owner(self, key: str, nbytes: int, exchange: Exchange[T]) -> T:
        """An exchange of up to `nbytes` with the server that holds the key, and with another one if that
        takes over meanwhile.
        """

    async def read(self, key: str, nbytes: int, use: Callable[[BulkReader], Awaitable[T]]) -> T:
        """One exchange of up to `nbytes` with the server that holds the key.

        BulkError, OSError or TimeoutError when it fails; a BulkRefused is the server's answer to it.
        """
        return await self.on_owner(key, nbytes, lambda server, ask: server.read(nbytes, use, asking=ask))

    async def write(self, key: str, nbytes: int, use: Callable[[BulkWriter], Awaitable[T]]) -> T:
        """As `read`, for a value that is written."""
        return await self.on_owner(key, nbytes, lambda server, ask: server.write(nbytes, use, asking=ask))

    async def memory_of(self, key: str) -> JsonObject:
        """INFO's memory of the server that holds the key. StoreUnavailable when there is no answer."""
        try:
            return await self.on_owner(key, 0, lambda server, _: server.info("memory"))
        except (BulkError, OSError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            raise StoreUnavailable(f"store {self.label} is not reachable: {reason}") from error

    @abstractmethod
    def servers(self) -> Sequence[ServerPart]:
        """The servers that values are written to, as now known."""

    async def shard_of(self, key: str) -> str:
        """The word in the names of keys about all values of the server that holds this key, and them."""
        return "0"

    @property
    def generation(self) -> str:
        """A word that changes when another server takes over keys, as at a failover."""
        return ""

    @abstractmethod
    async def close(self) -> None:
        """Closes all connections."""


async def all_of(works: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all, which run at once; the first error, but not before all have ended."""
    results = await asyncio.gather(*works, return_exceptions=True)
    collected: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        collected.append(result)
    return collected


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
