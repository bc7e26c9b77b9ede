"""One Redis or Valkey server: its small commands, and its connections for bulk transfers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from triptych.base.types import JsonObject
from triptych.store.address import StoreAddress
from triptych.store.bulk import BulkPool
from triptych.store.bulk_reader import BulkReader
from triptych.store.bulk_writer import BulkWriter
from triptych.store.control import Control
from triptych.store.results import StoreMemory

T = TypeVar("T")
C = TypeVar("C", BulkReader, BulkWriter)

#: Bulk connections for reads, and for writes. More are not faster: one server thread answers them.
_BULK_CONNECTIONS = 8


class Server:
    """The connections to one server, for one event loop."""

    def __init__(self, address: StoreAddress, timeout: float) -> None:
        self.address = address
        self.control = Control(address, timeout)
        self._readers = BulkPool(lambda: BulkReader.open(address), _BULK_CONNECTIONS, timeout)
        self._writers = BulkPool(lambda: BulkWriter.open(address), _BULK_CONNECTIONS, timeout)

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
