"""Small commands to a Redis Cluster: one round trip to each server that is concerned, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.typing import EncodableT

from triptych.ec_connector.store import keys
from triptych.ec_connector.store.bulk import BulkRedirected
from triptych.ec_connector.store.control import Commands, StoreUnavailable
from triptych.ec_connector.store.topology.server import Server
from triptych.ec_connector.store.topology.slots import key_of

if TYPE_CHECKING:
    from triptych.ec_connector.store.topology.cluster import RedisCluster

_NOT_SERVING = (ClusterDownError, MasterDownError, ReadOnlyError, TryAgainError)
#: A script's key that is not declared, a part of a large value, has not moved yet with its slot, or has.
_PARTLY_MOVED = "non local key"
#: Seconds before the next try of commands that the cluster does not serve now.
_PAUSE = 0.05
#: Redirects in a row that are followed at once: servers that point at each other have not agreed yet.
_QUICK_ROUNDS = 4

Words = Sequence[EncodableT]


class ClusterControl(Commands):
    """The client for small commands; those without a key go to the server that has the registry."""

    def __init__(self, cluster: RedisCluster) -> None:
        self._cluster = cluster

    async def execute_all(self, commands: Sequence[Words]) -> list[Any]:
        batch = _Batch(self._cluster, commands)
        try:
            async with asyncio.timeout(self._cluster.timeout):
                while batch.left:
                    await batch.send()
        except TimeoutError:
            raise StoreUnavailable(
                f"store {self._cluster.label} has not served {len(batch.left)} commands in "
                f"{self._cluster.timeout:g} s"
            ) from None
        return batch.replies

    async def close(self) -> None:
        """Nothing: the topology closes its connections."""


class _Batch:
    """Commands and their replies; `left` are the indices of those without one."""

    def __init__(self, cluster: RedisCluster, commands: Sequence[Words]) -> None:
        self.left = list(range(len(commands)))
        self.replies: list[Any] = [None] * len(commands)
        self._cluster = cluster
        self._commands = commands
        #: Where single commands are to be asked next, after ASK.
        self._asks: dict[int, Server] = {}
        self._rounds = 0

    async def send(self) -> None:
        """Sends all that are left, each to the server that has its key."""
        groups: dict[Server, list[int]] = {}
        for index in self.left:
            server = self._asks.get(index) or await self._cluster.owner(self._key(index))
            groups.setdefault(server, []).append(index)
        answers = await asyncio.gather(
            *(self._ask(server, group) for server, group in groups.items()), return_exceptions=True
        )
        self.left, pause = [], False
        for (server, group), answer in zip(groups.items(), answers, strict=True):
            if isinstance(answer, StoreUnavailable):
                await self._failed(server, group, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                for index, reply in zip(group, answer, strict=True):
                    pause |= self._answered(server, index, reply)
        self._rounds += 1
        if self.left and (pause or self._rounds > _QUICK_ROUNDS):
            await asyncio.sleep(_PAUSE)
            await self._cluster.refresh()

    def _key(self, index: int) -> str:
        return key_of(self._commands[index]) or keys.EPOCH

    async def _ask(self, server: Server, group: Sequence[int]) -> list[Any]:
        """The replies of one server. ASKING goes before a command, in the same pipeline."""
        words: list[Words] = []
        places = []
        for index in group:
            if self._asks.pop(index, None) is not None:
                words.append(("ASKING",))
            places.append(len(words))
            words.append(self._commands[index])
        replies = await server.control.replies(words)
        return [replies[place] for place in places]

    async def _failed(self, server: Server, group: Sequence[int], error: StoreUnavailable) -> None:
        """The server is not reachable: its commands go where their keys are now, if that is elsewhere."""
        if await self._cluster.other_owner(self._key(group[0]), server) is None:
            raise error
        self.left += group

    def _answered(self, server: Server, index: int, reply: object) -> bool:
        """Records a reply, or where the command goes next; whether to pause before that."""
        if isinstance(reply, AskError):
            ask = not isinstance(reply, MovedError)
            target = self._cluster.redirected(
                BulkRedirected(reply.slot_id, reply.host, reply.port, ask=ask), server
            )
            if ask:
                self._asks[index] = target
        elif isinstance(reply, _NOT_SERVING) or (
            isinstance(reply, ResponseError) and _PARTLY_MOVED in str(reply)
        ):
            self.left.append(index)
            return True
        elif isinstance(reply, Exception):
            raise server.control.refusal(reply)
        else:
            self.replies[index] = reply
            return False
        self.left.append(index)
        return False
