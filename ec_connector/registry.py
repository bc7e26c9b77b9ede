"""The registry: which workers and proxies live. The only way in which processes find each other.

Two hashes without a TTL (see `keys`). A value is its deadline in ms of the server's clock (16 digits), the
incarnation, a line end, and the WorkerInfo as msgpack.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgpack

from triptych.ec_connector import keys
from triptych.ec_connector.store import EmbeddingStore
from triptych.types import WorkerInfo

log = logging.getLogger(__name__)

#: Seconds that a registration lasts unless it is renewed.
TERM = 5.0

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

_DECLARE = (
    _NOW
    + """
local value = string.format('%016.0f', now + ARGV[2]) .. ARGV[3] .. '\\n' .. ARGV[4]
redis.call('HSET', KEYS[1], ARGV[1], value)
return 1
"""
)

_LIVE = (
    _NOW
    + """
local live = {}
for _, value in ipairs(redis.call('HVALS', KEYS[1])) do
  local deadline = tonumber(string.sub(value, 1, 16))
  if deadline and deadline > now then live[#live + 1] = string.sub(value, 17) end
end
return live
"""
)

# Only its own registration: a worker that came after it at the same address stays.
_WITHDRAW = """
local value = redis.call('HGET', KEYS[1], ARGV[1])
local mark = ARGV[2] .. '\\n'
if not value or string.sub(value, 17, 16 + #mark) ~= mark then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""

_COLLECT = (
    _NOW
    + """
local dead, all = 0, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local deadline = tonumber(string.sub(all[i + 1], 1, 16))
  if not deadline or deadline + ARGV[1] <= now then dead = dead + redis.call('HDEL', KEYS[1], all[i]) end
end
return dead
"""
)


class Registry:
    """Every method raises StoreUnavailable when the store is down."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._control = store.control

    async def register(self, info: WorkerInfo, term: float = TERM) -> None:
        """The worker lives for `term` seconds from now, in place of one of its pool at this address."""
        term_ms = int(term * 1000)
        await self._control.script(
            _DECLARE, [keys.WORKERS], _field(info), term_ms, info.incarnation, _pack(info)
        )

    async def withdraw(self, info: WorkerInfo) -> None:
        """The worker is gone. Another one that took its address stays. Idempotent."""
        await self._control.script(_WITHDRAW, [keys.WORKERS], _field(info), info.incarnation)

    async def workers(self) -> list[WorkerInfo]:
        """The live workers, by pool and address."""
        live: list[bytes] = await self._control.script(_LIVE, [keys.WORKERS])
        found = (_unpack(raw) for raw in live)
        return sorted((info for info in found if info is not None), key=lambda i: (i.pool, i.address))

    async def declare_proxy(self, proxy_id: str, term: float = TERM) -> None:
        """The proxy lives for `term` seconds from now."""
        await self._control.script(_DECLARE, [keys.PROXIES], proxy_id, int(term * 1000), proxy_id, b"")

    async def proxies(self) -> int:
        """How many proxies live."""
        return len(await self._control.script(_LIVE, [keys.PROXIES]))

    async def collect_dead(self, older_than: float = keys.DEAD_AFTER) -> int:
        """Deletes registrations whose deadline is more than `older_than` seconds past; how many."""
        dead = 0
        for name in (keys.WORKERS, keys.PROXIES):
            dead += int(await self._control.script(_COLLECT, [name], int(older_than * 1000)))
        return dead


def _field(info: WorkerInfo) -> str:
    return f"{info.pool} {info.address}"


def _pack(info: WorkerInfo) -> bytes:
    return bytes(msgpack.packb(asdict(info), use_bin_type=True))


def _unpack(raw: bytes) -> WorkerInfo | None:
    """None, with a log line, for a registration that no version of ours has written."""
    try:
        fields: Any = msgpack.unpackb(
            raw.partition(b"\n")[2], strict_map_key=True, max_ext_len=0, max_bin_len=0
        )
        info = WorkerInfo(**{**fields, "namespaces": tuple(fields["namespaces"])})
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        log.warning("a registration of %d bytes cannot be read", len(raw))
        return None
    texts = (info.address, info.pool, info.incarnation, info.model_key, info.model, info.modality)
    numbers = info.capacity.values() if isinstance(info.capacity, Mapping) else (None,)
    if all(isinstance(text, str) for text in (*texts, *info.namespaces)) and all(
        isinstance(n, int) for n in numbers
    ):
        return info
    log.warning("a registration has fields of the wrong kind")
    return None
