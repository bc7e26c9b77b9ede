"""A store that is a primary with replicas, which Sentinels watch and replace.

redis-py's Sentinel is not used: it takes the first answer, which may be that of a Sentinel that is cut off
with the old primary, uses the store's credentials always or never, and does not read renewed TLS files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from redis.typing import EncodableT

from triptych.store.address import StoreAddress
from triptych.store.bulk import BulkError, BulkNotServing, BulkRefused, ValueTooLarge
from triptych.store.control import Commands, Control, StoreFull, StoreUnavailable
from triptych.store.topology.location import StoreLocation
from triptych.store.topology.topology import Exchange, Server, ServerPart, Topology

T = TypeVar("T")

#: Seconds between two questions to the Sentinels while all is well: a connection to a server that is no
#: longer the primary may stay open.
_ASK_SECONDS = 2.0
#: Seconds for one Sentinel's answer.
_ANSWER_SECONDS = 1.0


class SentinelPrimary(Topology):
    """The primary that Sentinels name; another one after a failover."""

    def __init__(self, location: StoreLocation, timeout: float) -> None:
        self.label = location.label
        self.control = _PrimaryControl(self)
        self._first = location.servers[0]
        self._timeout = timeout
        wait = min(timeout, _ANSWER_SECONDS)
        self._sentinels = [_Sentinel(address, location.service, wait) for address in location.servers]
        self._server: Server | None = None
        #: The one before, which commands may still be under way to.
        self._before: Server | None = None
        self._asked = float("-inf")
        self._asking: asyncio.Task[Server] | None = None

    async def connect(self) -> None:
        await self.control.execute("PING")

    async def on_owner(self, key: str, nbytes: int, exchange: Exchange[T]) -> T:
        server = await self._primary()
        try:
            return await exchange(server, False)
        except (BulkError, OSError, TimeoutError, StoreUnavailable) as error:
            after = server if _is_answer(error) else await self._primary(failed=server)
            if after is server:
                raise
        return await exchange(after, False)

    async def _primary(self, failed: Server | None = None) -> Server:
        """The primary as last named, and as named now where that one has failed."""
        if self._server is None or self._server is failed:
            return await asyncio.shield(self._question())
        if time.monotonic() - self._asked > _ASK_SECONDS:
            self._question()
        return self._server

    def _question(self) -> asyncio.Task[Server]:
        """The question to the Sentinels that is under way; a new one where there is none."""
        if self._asking is None or self._asking.done():
            self._asked = time.monotonic()
            self._asking = asyncio.create_task(self._find(), name="sentinels")
            # Those who wait for it may have been cancelled: its error is read here.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._asking

    async def _find(self) -> Server:
        """The server that the Sentinels name; StoreUnavailable when none that answers knows it.

        A Sentinel that is cut off from the others goes on naming the primary of its side: all are asked, and
        of their answers that of the newest configuration holds.
        """
        queries = (sentinel.primary() for sentinel in self._sentinels)
        replies = await asyncio.gather(*queries, return_exceptions=True)
        answers = [reply for reply in replies if not isinstance(reply, BaseException)]
        if not answers:
            raise StoreUnavailable(f"the Sentinels name no primary: {'; '.join(map(str, replies))}")
        _, host, port = max(answers)
        address = replace(self._first, host=host, port=port)
        if self._server is None or self._server.address != address:
            if self._before is not None:
                await self._before.close()
            if self._server is not None:
                self._server.drop_idle()
            self._before, self._server = self._server, Server(address, self._timeout)
        return self._server

    def servers(self) -> Sequence[ServerPart]:
        return [] if self._server is None else [ServerPart(self._server, 1.0)]

    @property
    def generation(self) -> str:
        return "" if self._server is None else self._server.address.label

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        for each in (self._server, self._before, *self._sentinels):
            if each is not None:
                await each.close()


def _is_answer(error: Exception) -> bool:
    """Whether the server has answered, as one that serves."""
    return isinstance(error, BulkRefused | ValueTooLarge | StoreFull) and not isinstance(
        error, BulkNotServing
    )


class _PrimaryControl(Commands):
    """Small commands to the primary."""

    def __init__(self, topology: SentinelPrimary) -> None:
        self._topology = topology

    async def execute_all(self, commands: Sequence[Sequence[EncodableT]]) -> list[Any]:
        return await self._topology.on_owner("", 0, lambda server, _: server.control.execute_all(commands))


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
                reply = await control.execute("SENTINEL", "MASTER", self._service)
            except StoreUnavailable as error:
                reasons.append(str(error))
                continue
            # Those that have answered are the first to be used the next time.
            self._controls.sort(key=lambda each: each is not control)
            fields = dict(zip(reply[::2], reply[1::2], strict=False))
            return int(fields.get(b"config-epoch", 0)), named[0].decode(), int(named[1])
        raise StoreUnavailable("; ".join(reasons))

    async def close(self) -> None:
        for control in self._controls:
            await control.close()
