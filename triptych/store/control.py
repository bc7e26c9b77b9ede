"""Small commands and Lua scripts over redis-py, each with a deadline; all failures raise StoreUnavailable."""

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

    async def execute(self, *args: EncodableT) -> Any:
        """One command's reply. StoreUnavailable when there is none in time, or it is an error."""
        return (await self.execute_all([args]))[0]

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
        for args in commands:
            pipeline.execute_command(*args)
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


#: Of a reply of pcall: an error other than that the key holds no string is the script's, and that one leaves
#: no bytes. Nobody but another program, or a slip, makes such keys; the item is encoded again.
OTHER_KIND = """
if type(%(reply)s) == 'table' then
  if not string.find(%(reply)s.err, 'WRONGTYPE', 1, true) then return %(reply)s end
  %(reply)s = ''
  other_kind = true
end
"""

#: The head of a value and a new TTL for it and its parts, in one step. The TTL in it is not yet verified:
#: at most a week.
LOOK_UP = (
    """
local other_kind = false
local head = redis.pcall('GETRANGE', KEYS[1], 0, 4095)
"""
    + OTHER_KIND % {"reply": "head"}
    + """
if #head < 48 then return head end
local a, b, c, d = string.byte(head, 9, 12)
local ttl = math.min(a + 256 * (b + 256 * (c + 256 * d)), 604800)
redis.call('EXPIRE', KEYS[1], ttl)
local e, f, g, h = string.byte(head, 13, 16)
local parts = math.min(e + 256 * (f + 256 * (g + 256 * h)), 1024)
if parts > 0 then
  local id = {}
  for i = 17, 24 do id[#id + 1] = string.format('%02x', string.byte(head, i)) end
  for i = 0, parts - 1 do
    local part = KEYS[1] .. ':' .. table.concat(id) .. ':' .. i
    if redis.call('EXPIRE', part, ttl + tonumber(ARGV[1])) == 0 then return '' end
  end
end
local size = string.byte(head, 7) + 256 * string.byte(head, 8)
return string.sub(head, 1, 48 + size)
"""
)

#: Deletes a value whose first 4 KiB have this SHA-1: that of no bytes names a key of another kind.
DROP_DAMAGED = (
    """
local other_kind = false
local head = redis.pcall('GETRANGE', KEYS[1], 0, 4095)
"""
    + OTHER_KIND % {"reply": "head"}
    + """
if (#head == 0 and not other_kind) or redis.sha1hex(head) ~= ARGV[1] then return 0 end
return redis.call('UNLINK', KEYS[1])
"""
)

#: Deletes the parts of a write whose header is not the stored one: another writer's header came first. The
#: write's own header can be there although its SET said no, where the reply to an earlier try was lost.
DELETE_PARTS = (
    """
local other_kind = false
local id = redis.pcall('GETRANGE', KEYS[1], 16, 23)
"""
    + OTHER_KIND % {"reply": "id"}
    + """
local hex = {}
for i = 1, #id do hex[#hex + 1] = string.format('%02x', string.byte(id, i)) end
if table.concat(hex) == ARGV[1] then return 0 end
for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1
"""
)

#: The store's epoch, made if there is none, and the server's time.
EPOCH = """
redis.call('SET', KEYS[1], ARGV[1], 'NX')
local time = redis.call('TIME')
return {redis.call('GET', KEYS[1]), time[1], time[2]}
"""

#: The word that is noted under a key; notes another one where there is none, or in its place.
NOTE = """
local noted = redis.call('GET', KEYS[1])
if not noted or ARGV[3] == '1' then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return noted
"""


#: The first lines of every script with deadlines: `now`, in milliseconds of the server's clock. The clocks
#: of workers differ, so deadlines are compared in the server.
NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

#: More than clocks drift between two replies, less than the shortest term in the store.
SLACK_SECONDS = 5.0


class ServerClock:
    """A counter of jumps of the server's clock against this process's monotonic clock. Pure.

    When the server's clock jumps ahead, leases and registrations expire at once although their owners live:
    the clock was set, or the machine was suspended or migrated.
    """

    def __init__(self, slack: float = SLACK_SECONDS) -> None:
        self.jumps = 0
        self._slack = slack
        #: Bounds of the server's time less ours.
        self._bounds: tuple[float, float] | None = None

    def answered(self, server: float, sent: float, received: float) -> None:
        """Adds the `server`'s time from a reply; its command was `sent` and answered (`received`) then."""
        low, high = server - received, server - sent
        known, self._bounds = self._bounds, (low, high)
        if known is not None and (low > known[1] + self._slack or high < known[0] - self._slack):
            self.jumps += 1
