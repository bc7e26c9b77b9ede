"""The registry of live workers and proxies: the only way in which processes find each other.

A hash of the workers and sorted sets of deadlines in ms of the server's clock, without a TTL (see `keys`). A
worker's value is its incarnation, a line end, and the WorkerInfo as msgpack.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import msgpack

from triptych.base.types import JsonObject, WorkerInfo
from triptych.store import keys
from triptych.store.control import NOW
from triptych.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

#: Seconds that a registration lasts unless it is renewed.
TERM = 5.0

# An unchanged registration does not change the version, so that proxies need not read the workers again.
REGISTER = (
    NOW
    + """
local name, term, value = ARGV[1], ARGV[2], ARGV[3]
local deadline = tonumber(redis.call('ZSCORE', KEYS[2], name) or '0')
if deadline <= now or redis.call('HGET', KEYS[1], name) ~= value then
  redis.call('HSET', KEYS[1], name, value)
  redis.call('INCR', KEYS[3])
end
redis.call('ZADD', KEYS[2], string.format('%.0f', now + term), name)
return 1
"""
)

# Only its own registration: a later worker at the same address stays registered.
WITHDRAW = """
local value = redis.call('HGET', KEYS[1], ARGV[1])
local mark = ARGV[2] .. '\\n'
if not value or string.sub(value, 1, #mark) ~= mark then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('INCR', KEYS[3])
return redis.call('HDEL', KEYS[1], ARGV[1])
"""

_LIVE = """
local function live(after)
  local found = {}
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], after, '+inf')) do
    local value = redis.call('HGET', KEYS[1], name)
    if value then found[#found + 1] = value end
  end
  return found
end
local after = string.format('(%.0f', now)
"""

LIVE_WORKERS = NOW + _LIVE + "return live(after)"

DECLARE = NOW + "return redis.call('ZADD', KEYS[1], string.format('%.0f', now + ARGV[2]), ARGV[1])"

COUNT_PROXIES = NOW + "return redis.call('ZCOUNT', KEYS[1], string.format('(%.0f', now), '+inf')"

# Within one version workers can only expire: version and number of live workers identify the state.
LOOK = (
    NOW
    + _LIVE
    + """
local proxy, term, word, known = unpack(ARGV)
redis.call('SET', KEYS[5], word, 'NX')
local epoch = redis.call('GET', KEYS[5])
redis.call('ZADD', KEYS[4], string.format('%.0f', now + term), proxy)
local proxies = redis.call('ZCOUNT', KEYS[4], after, '+inf')
local version = redis.call('GET', KEYS[3]) or '0'
local mark = epoch .. ' ' .. version .. ' ' .. redis.call('ZCOUNT', KEYS[2], after, '+inf')
if mark == known then return {mark, epoch, proxies} end
return {mark, epoch, proxies, live(after)}
"""
)

COLLECT = (
    NOW
    + """
local limit = string.format('%.0f', now - ARGV[1])
local dead = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', limit)
for _, name in ipairs(dead) do redis.call('HDEL', KEYS[1], name) end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', limit)
return #dead + redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', limit)
"""
)

WORKER_KEYS = [keys.WORKERS, keys.WORKER_DEADLINES, keys.VERSION]


@dataclass(frozen=True, slots=True)
class RegistrySnapshot:
    """A snapshot of the registry.

    `workers` is None when they have not changed since the snapshot whose `mark` was given. `epoch` changes
    when the store is flushed or restarted.
    """

    mark: str
    epoch: str
    proxies: int
    workers: list[WorkerInfo] | None


class Registry:
    """The registry in the store. Every method raises StoreUnavailable when the store is down."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._control = store.control

    async def register(self, info: WorkerInfo, term: float = TERM) -> None:
        """Registers the worker for `term` seconds; replaces one of its pool at this address."""
        await self._control.script(REGISTER, WORKER_KEYS, _field(info), int(term * 1000), _value(info))

    async def withdraw(self, info: WorkerInfo) -> None:
        """Deletes the worker's registration, but not a later worker's at its address. Idempotent."""
        await self._control.script(WITHDRAW, WORKER_KEYS, _field(info), info.incarnation)

    async def workers(self) -> list[WorkerInfo]:
        """The live workers, by pool and address."""
        return _infos(await self._control.script(LIVE_WORKERS, WORKER_KEYS))

    async def poll(self, proxy_id: str, term: float = TERM, *, mark: str = "") -> RegistrySnapshot:
        """A snapshot for a proxy, by one command that also declares the proxy for `term` seconds.

        Its cost depends on the number of workers only if they have changed since `mark`.
        """
        found = await self._control.script(
            LOOK,
            [*WORKER_KEYS, keys.PROXIES, keys.EPOCH],
            proxy_id,
            int(term * 1000),
            uuid.uuid4().hex,
            mark,
        )
        workers = _infos(found[3]) if len(found) > 3 else None
        epoch = self._store.epoch_with(found[1].decode())
        return RegistrySnapshot(found[0].decode(), epoch, int(found[2]), workers)

    async def declare_proxy(self, proxy_id: str, term: float = TERM) -> None:
        """Declares a live proxy for `term` seconds."""
        await self._control.script(DECLARE, [keys.PROXIES], proxy_id, int(term * 1000))

    async def proxies(self) -> int:
        """The number of live proxies."""
        return int(await self._control.script(COUNT_PROXIES, [keys.PROXIES]))

    async def collect_dead(self, older_than: float = keys.DEAD_AFTER) -> int:
        """Deletes registrations that expired more than `older_than` seconds ago; returns their number."""
        names = [keys.WORKERS, keys.WORKER_DEADLINES, keys.PROXIES]
        return int(await self._control.script(COLLECT, names, int(older_than * 1000)))


def _infos(values: list[bytes]) -> list[WorkerInfo]:
    found = (_unpack(value) for value in values)
    return sorted((info for info in found if info is not None), key=lambda i: (i.pool, i.address))


def _field(info: WorkerInfo) -> str:
    return f"{info.pool} {info.address}"


def _value(info: WorkerInfo) -> bytes:
    return info.incarnation.encode() + b"\n" + _pack(info)


def _pack(info: WorkerInfo) -> bytes:
    return bytes(msgpack.packb(asdict(info), use_bin_type=True))


def _unpack(raw: bytes) -> WorkerInfo | None:
    """A registration's WorkerInfo; None, with a log line, for one that Triptych has not written."""
    try:
        fields: JsonObject = msgpack.unpackb(
            raw.partition(b"\n")[2], strict_map_key=True, max_ext_len=0, max_bin_len=0
        )
        info = WorkerInfo(**{**fields, "namespaces": tuple(fields["namespaces"])})
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        logger.warning("a registration of %d bytes cannot be read", len(raw))
        return None
    texts = (info.address, info.pool, info.incarnation, info.model_key, info.model, info.modality, info.kind)
    numbers = info.capacity.values() if isinstance(info.capacity, Mapping) else (None,)
    if all(isinstance(text, str) for text in (*texts, *info.namespaces)) and all(
        isinstance(n, int) for n in numbers
    ):
        return info
    logger.warning("a registration has fields of the wrong type")
    return None
