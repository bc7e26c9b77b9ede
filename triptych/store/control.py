"""Small commands and scripts over redis-py, each with a deadline; all failures raise StoreUnavailable."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.typing import EncodableT

from triptych.base.errors import ConfigError, TriptychError
from triptych.store.address import StoreAddress
from triptych.store.remedies import with_first_remedy, with_remedy
from triptych.store.tls import TlsConnection

_CONNECTIONS = 16


class StoreUnavailable(TriptychError):
    """The store does not answer, or refuses the command."""


class StoreRefused(StoreUnavailable):
    """The store answers, and refuses the command."""


class StoreFull(StoreRefused):
    """The store is full and has nothing that it may evict."""


class Commands(ABC):
    """A client for small commands to the store. Replies are bytes."""

    @abstractmethod
    async def execute_all(self, commands: Sequence[Sequence[EncodableT]]) -> list[Any]:
        """The replies to several commands, in one round trip to each server that is concerned.

        StoreUnavailable when one has none in time, or it is an error.
        """

    async def execute(self, *words: EncodableT) -> Any:
        """One command's reply. StoreUnavailable when there is none in time, or it is an error."""
        return (await self.execute_all([words]))[0]

    async def script(self, text: str, keys: Sequence[str], *args: EncodableT) -> Any:
        """One script's reply; the server caches compiled scripts."""
        return await self.execute("EVAL", text, len(keys), *keys, *args)


class Control(Commands):
    """The client for small commands to one server."""

    def __init__(self, address: StoreAddress, timeout: float) -> None:
        self._label = address.label
        self._hide = address.without_password
        self._tls = address.tls
        self._timeout = timeout
        self._answered = False
        options: dict[str, Any] = {
            "db": address.db,
            "username": address.username or None,
            "password": address.password or None,
            "protocol": 2,
            # No CLIENT SETINFO: a command that users of the store would have to be allowed.
            "driver_info": None,
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            # The server may have closed a pooled connection, which shows only when it is used: retry once.
            "retry": Retry(NoBackoff(), 1),
        }
        if address.path:
            options |= {"connection_class": UnixDomainSocketConnection, "path": address.path}
        else:
            options |= {"host": address.host, "port": address.port}
            if address.tls is not None:
                options |= {"connection_class": TlsConnection, "tls": address.tls}
        pool = BlockingConnectionPool(max_connections=_CONNECTIONS, timeout=timeout, **options)
        self._redis: Redis = Redis.from_pool(pool)

    async def execute_all(self, commands: Sequence[Sequence[EncodableT]]) -> list[Any]:
        replies = await self.replies(commands)
        if any(map(_is_read_only, replies)):
            # The server has become a replica, and its name may be another's now: resolved again at a connect.
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            replies = await self.replies(commands)
        for reply in replies:
            if isinstance(reply, Exception):
                raise self.refusal(reply)
        return replies

    def refusal(self, error: Exception) -> StoreRefused:
        """The error for a command's error reply."""
        kind = StoreFull if isinstance(error, OutOfMemoryError) else StoreRefused
        return kind(f"store {self._label} refused a command: {with_remedy(self._hide(error))}")

    async def replies(self, commands: Sequence[Sequence[EncodableT]]) -> list[Any]:
        """As `execute_all`, but with a ResponseError in the place of an error reply."""
        pipeline = self._redis.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words)
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        try:
            async with asyncio.timeout(self._timeout):
                replies = list(await pipeline.execute(raise_on_error=False))
        # Raised without the cause: a server without AUTH repeats the password in its error.
        except ResponseError as error:
            raise self.refusal(error) from None
        except (RedisError, OSError, TimeoutError, ConfigError) as error:
            said = self._hide(error) or f"no answer in {self._timeout:g} s"
            reason = with_remedy(said) if self._answered else with_first_remedy(said, self._tls)
            raise StoreUnavailable(f"store {self._label} is not reachable: {reason}") from None
        # redis-py writes under `asyncio.wait_for`, which in Python 3.11 loses a cancellation that comes
        # together with its result. A caller's loop would then never end.
        if task is not None and task.cancelling() > cancels:
            raise asyncio.CancelledError
        self._answered = True
        return replies

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()


def _is_read_only(reply: object) -> bool:
    """Whether a replica refused a write. Servers before Redis 7 name it inside a script's error."""
    return isinstance(reply, ReadOnlyError) or (isinstance(reply, ResponseError) and "READONLY" in str(reply))
