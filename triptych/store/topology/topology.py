"""The interface of a store's topology: small commands, bulk transfers by key, and the servers behind them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from triptych.store.bulk_reader import BulkReader
from triptych.store.bulk_writer import BulkWriter
from triptych.store.control import Commands
from triptych.store.topology.server import Server

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

    @abstractmethod
    def servers(self) -> Sequence[ServerPart]:
        """The servers that values are written to, as now known."""

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
    found: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found
