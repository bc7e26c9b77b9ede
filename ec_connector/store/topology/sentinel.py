"""A store that is a primary with replicas, which Sentinels watch and replace."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from redis.typing import EncodableT

from triptych.ec_connector.store.address import StoreAddress
from triptych.ec_connector.store.bulk import BulkError, BulkNotServing, BulkRefused, ValueTooLarge
from triptych.ec_connector.store.bulk_reader import BulkReader
from triptych.ec_connector.store.bulk_writer import BulkWriter
from triptych.ec_connector.store.control import Commands, Control, StoreFull, StoreUnavailable
from triptych.ec_connector.store.topology.location import StoreLocation
from triptych.ec_connector.store.topology.server import Server
from triptych.ec_connector.store.topology.topology import ServerPart, Topology

T = TypeVar("T")

#: Seconds between two questions to the Sentinels while all is well: a connection to a server that is no
#: longer the primary may stay open.
_ASK_SECONDS = 2.0
#: Most seconds for one Sentinel's answer: the next one is asked then.
_ANSWER_SECONDS = 1.0


class SentinelPrimary(Topology):
    """The primary that Sentinels name; another one after a failover."""

    def __init__(self, location: StoreLocation, timeout: float) -> None:
        self.label = location.label
        self.control = _PrimaryControl(self)
        self._first = location.servers[0]
        self._service = location.service
        self._timeout = timeout
        self._sentinels = _Sentinels(location.servers, location.service, min(timeout, _ANSWER_SECONDS))
        self._server: Server | None = None
        #: Servers that were the primary, and until when.
        self._retired: deque[tuple[float, Server]] = deque()
        self._asked = float("-inf")
        self._asking: asyncio.Task[Server] | None = None

    async def connect(self) -> None:
        await self.control.execute("PING")

    async def current(self) -> Server:
        """The primary as last named; StoreUnavailable when no Sentinel has named one yet."""
        if self._server is None:
            return await self.ask(None)
        if time.monotonic() - self._asked > _ASK_SECONDS:
            self._question()
        return self._server

    async def ask(self, failed: Server | None) -> Server:
        """The primary that the Sentinels name now, unless another than `failed` has become it meanwhile."""
        if self._server is not None and self._server is not failed:
            return self._server
        return await asyncio.shield(self._question())

    def _question(self) -> asyncio.Task[Server]:
        """The question to the Sentinels that is under way; a new one where there is none."""
        if self._asking is None or self._asking.done():
            self._asked = time.monotonic()
            self._asking = asyncio.create_task(self._find(), name="sentinels")
            # Those who wait for it may have been cancelled: its error is read here.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._asking

    async def _find(self) -> Server:
        host, port = await self._sentinels.primary()
        address = replace(self._first, host=host, port=port)
        if self._server is None or self._server.address != address:
            await self._retire(self._server)
            self._server = Server(address, self._timeout)
        return self._server

    async def _retire(self, server: Server | None) -> None:
        """Keeps the server until commands to it have ended, and closes those that were retired long ago."""
        now = time.monotonic()
        while self._retired and now - self._retired[0][0] > 2 * self._timeout:
            await self._retired.popleft()[1].close()
        if server is not None:
            server.drop_idle()
            self._retired.append((now, server))

    async def read(self, key: str, nbytes: int, use: Callable[[BulkReader], Awaitable[T]]) -> T:
        return await self._on_primary(lambda server: server.read(nbytes, use))

    async def write(self, key: str, nbytes: int, use: Callable[[BulkWriter], Awaitable[T]]) -> T:
        return await self._on_primary(lambda server: server.write(nbytes, use))

    async def _on_primary(self, transfer: Callable[[Server], Awaitable[T]]) -> T:
        server = await self.current()
        try:
            return await transfer(server)
        except (BulkError, OSError, TimeoutError) as error:
            if _is_answer(error):
                raise
            after = await self.ask(server)
            if after is server:
                raise
        return await transfer(after)

    def servers(self) -> Sequence[ServerPart]:
        return [] if self._server is None else [ServerPart(self._server, 1.0)]

    @property
    def generation(self) -> str:
        return "" if self._server is None else self._server.address.label

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        for server in [self._server, *(server for _, server in self._retired)]:
            if server is not None:
                await server.close()
        await self._sentinels.close()


def _is_answer(error: Exception) -> bool:
    """Whether the server has answered, as one that serves."""
    return isinstance(error, BulkRefused | ValueTooLarge) and not isinstance(error, BulkNotServing)


class _PrimaryControl(Commands):
    """Small commands to the primary."""

    def __init__(self, topology: SentinelPrimary) -> None:
        self._topology = topology

    async def execute_all(self, commands: Sequence[Sequence[EncodableT]]) -> list[Any]:
        server = await self._topology.current()
        try:
            return await server.control.execute_all(commands)
        except StoreFull:
            raise
        except StoreUnavailable:
            after = await self._topology.ask(server)
            if after is server:
                raise
        return await after.control.execute_all(commands)

    async def close(self) -> None:
        """Nothing: the topology closes its connections."""


class _Sentinels:
    """The Sentinels of a shard.

    One that is cut off from the others goes on naming the primary of its side: all are asked, and of their
    answers that of the newest configuration holds.
    """

    def __init__(self, addresses: Sequence[StoreAddress], service: str, timeout: float) -> None:
        self._sentinels = [_Sentinel(address, service, timeout) for address in addresses]

    async def primary(self) -> tuple[str, int]:
        """Host and port; StoreUnavailable when no Sentinel that answers knows the primary."""
        asked = (sentinel.primary() for sentinel in self._sentinels)
        replies = await asyncio.gather(*asked, return_exceptions=True)
        answers = [reply for reply in replies if not isinstance(reply, BaseException)]
        if not answers:
            raise StoreUnavailable(f"the Sentinels name no primary: {'; '.join(map(str, replies))}")
        _, host, port = max(answers)
        return host, port

    async def close(self) -> None:
        for sentinel in self._sentinels:
            await sentinel.close()


class _Sentinel:
    """One Sentinel, which may want the store's credentials or none."""

    def __init__(self, address: StoreAddress, service: str, timeout: float) -> None:
        self._service = service
        plain = replace(address, username="", password="", db=0)
        known = [replace(address, db=0)] if address.password else []
        self._controls = [Control(each, timeout) for each in (plain, *known)]

    async def primary(self) -> tuple[int, str, int]:
        """The configuration's epoch, and the primary's host and port; StoreUnavailable without one."""
        reasons = []
        for control in list(self._controls):
            try:
                named = await control.execute("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
                if not named:
                    reasons.append(f"a Sentinel knows no primary named {self._service}")
                    continue
                told = await control.execute("SENTINEL", "MASTER", self._service)
            except StoreUnavailable as error:
                reasons.append(str(error))
                continue
            # Those that have answered are the first to be used the next time.
            self._controls.sort(key=lambda each: each is not control)
            fields = dict(zip(told[::2], told[1::2], strict=False))
            return int(fields.get(b"config-epoch", 0)), named[0].decode(), int(named[1])
        raise StoreUnavailable("; ".join(reasons))

    async def close(self) -> None:
        for control in self._controls:
            await control.close()
