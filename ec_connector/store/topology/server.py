"""One Redis or Valkey server: its small commands, and its connections for bulk transfers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from triptych.ec_connector.store.address import StoreAddress
from triptych.ec_connector.store.bulk import BulkPool
from triptych.ec_connector.store.bulk_reader import BulkReader
from triptych.ec_connector.store.bulk_writer import BulkWriter
from triptych.ec_connector.store.control import Control
from triptych.ec_connector.store.results import StoreMemory
from triptych.types import JsonObject

T = TypeVar("T")

#: Bulk connections for reads, and for writes. More are not faster: one server thread answers them.
_BULK_CONNECTIONS = 8


class Server:
    """The connections to one server, for one event loop."""

    def __init__(self, address: StoreAddress, timeout: float) -> None:
        self.address = address
        self.control = Control(address, timeout)
        self._readers = BulkPool(lambda: BulkReader.open(address), _BULK_CONNECTIONS, timeout)
        self._writers = BulkPool(lambda: BulkWriter.open(address), _BULK_CONNECTIONS, timeout)

    async def read(self, nbytes: int, use: Callable[[BulkReader], Awaitable[T]]) -> T:
        """One exchange of up to `nbytes`; BulkError, OSError or TimeoutError when it fails."""
        return await self._readers.transfer(nbytes, use)

    async def write(self, nbytes: int, use: Callable[[BulkWriter], Awaitable[T]]) -> T:
        """As `read`, on a connection for writes."""
        return await self._writers.transfer(nbytes, use)

    def drop_idle(self) -> None:
        """Closes idle bulk connections: the next transfers resolve the server's name again."""
        self._readers.drop_idle()
        self._writers.drop_idle()

    async def info(self, section: str) -> dict[str, str]:
        """A section of INFO. StoreUnavailable when the server does not report it."""
        raw: bytes | JsonObject = await self.control.execute("INFO", section)
        if isinstance(raw, dict):
            return {name: str(value) for name, value in raw.items()}
        lines = (line.partition(":") for line in raw.decode(errors="replace").splitlines())
        return {name: value for name, _, value in lines}

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
