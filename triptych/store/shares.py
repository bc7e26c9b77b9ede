"""Shares of the store by tenant: who is above its share deletes its own oldest values before it saves.

The server evicts what was least recently used, whoever saved it: one key that sends many pictures would evict
everybody's. So each shard holds an approximate count of bytes by tenant and kind of value, and an index of
the values by their last save. What the server has evicted by itself, a scan finds out. Only savers that know
tenants count: the values of others are evicted as ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.store import keys
from triptych.store.control import NOW, OTHER_KIND, Commands, StoreUnavailable
from triptych.store.topology.topology import Topology

logger = logging.getLogger(__name__)

#: The part of its memory above which a server is near its limit, and which the shares divide. Below it, a
#: tenant may have all of it.
NEAR = 0.8
#: Values as young as this may not have been loaded yet, and stay.
_YOUNG_SECONDS = 2.0
#: Values that one save deletes at most, and bytes of them as a multiple of its own.
_MOST_VALUES, _MOST_BYTES = 64, 4
#: Seconds for which a server's memory is taken as known, between two steps of the scan, and without shares
#: where the server refused them.
_MEMORY_SECONDS, _SCAN_SECONDS, _REFUSED_SECONDS = 1.0, 2.0, 60.0
#: The part of a server's memory after the saving of which it is looked at again.
_MOST_DRIFT = 1 / 32
#: Seconds in which saves are collected before they are noted.
_NOTE_SECONDS = 0.1
#: Seconds between two lines of the log about values that were deleted.
_SAY_SECONDS = 10.0
#: Tenants of one step of the scan, and about how many values of each.
_SCAN_TENANTS, _SCAN_VALUES = 16, 256
#: Seconds that an index outlives its values: a saver renews it.
_INDEX_GRACE = 600

#: Notes the saves of values ARGV[8] and on under ARGV[1]. Where ARGV[2] bytes too many are stored and the
#: tenant has more than its part of ARGV[3], its oldest values leave the index: they are the reply.
TAKE = (
    NOW
    + """
local size, added = 0, 0
for i = 8, #ARGV do
  local bytes = tonumber(string.match(ARGV[i], '%d+$'))
  size = size + bytes
  if redis.call('ZADD', KEYS[2], now, ARGV[i]) == 1 then added = added + bytes end
end
local own = redis.call('HINCRBY', KEYS[1], ARGV[1], added)
redis.call('EXPIRE', KEYS[2], ARGV[4])
local named, excess, tenants = {}, tonumber(ARGV[2]), redis.call('HLEN', KEYS[1])
if excess <= 0 or tenants < 2 then return named end
local free = math.min(excess, own - tonumber(ARGV[3]) / tenants, size * tonumber(ARGV[7]))
if free <= 0 then return named end
for _, value in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[5], 'LIMIT', 0, ARGV[6])) do
  if free <= 0 then break end
  if value ~= ARGV[#ARGV] then
    local bytes = tonumber(string.match(value, '%d+$'))
    redis.call('ZREM', KEYS[2], value)
    redis.call('HINCRBY', KEYS[1], ARGV[1], -bytes)
    free = free - bytes
    named[#named + 1] = value
  end
end
return named
"""
)

#: Takes values that are gone, ARGV[3] and on, out of the index. ARGV[2] is what the whole index was found to
#: hold, "" where only a part was looked at; what a short one holds is counted here, with what came since.
CORRECT = """
for i = 3, #ARGV do
  if redis.call('ZREM', KEYS[2], ARGV[i]) == 1 then
    redis.call('HINCRBY', KEYS[1], ARGV[1], -tonumber(string.match(ARGV[i], '%d+$')))
  end
end
if ARGV[2] ~= '' then
  local found = ARGV[2]
  if redis.call('ZCARD', KEYS[2]) <= 512 then
    found = 0
    for _, value in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
      found = found + tonumber(string.match(value, '%d+$'))
    end
  end
  redis.call('HSET', KEYS[1], ARGV[1], found)
end
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('HDEL', KEYS[1], ARGV[1]) end
"""

#: Deletes a value with its parts.
DELETE = (
    """
local other_kind = false
local head = redis.pcall('GETRANGE', KEYS[1], 0, 23)
"""
    + OTHER_KIND % {"reply": "head"}
    + """
if #head == 24 then
  local e, f, g, h = string.byte(head, 13, 16)
  local id = {}
  for i = 17, 24 do id[#id + 1] = string.format('%02x', string.byte(head, i)) end
  for i = 0, math.min(e + 256 * (f + 256 * (g + 256 * h)), 1024) - 1 do
    redis.call('UNLINK', KEYS[1] .. ':' .. table.concat(id) .. ':' .. i)
  end
end
return redis.call('UNLINK', KEYS[1])
"""
)


@dataclass(slots=True)
class Memory:
    """A server's bytes as reported `at` a time, and the bytes that this process has saved since. Pure."""

    used: int
    limit: int
    at: float
    saved: int = 0
    deleted: int = 0

    @property
    def shared(self) -> int:
        """The bytes that the shares divide."""
        return int(NEAR * self.limit)

    def excess(self, nbytes: int) -> int:
        """Bytes above the mark once `nbytes` more are stored; 0 without a limit."""
        if not self.limit:
            return 0
        return max(0, self.used + self.saved + nbytes - self.deleted - self.shared)

    def is_stale(self, now: float) -> bool:
        """Whether it is long ago, or much has been saved since, which takes more than its own bytes."""
        long_ago = now > self.at + _MEMORY_SECONDS and self.excess(0) > 0
        return long_ago or (self.limit > 0 and self.saved > self.limit * _MOST_DRIFT)


@dataclass(slots=True)
class _Pass:
    """A look at one tenant's whole index, which takes several steps."""

    cursor: int = 0
    found: int = 0


class StoreShares:
    """The shares of the tenants that one process saves for, in one event loop.

    Saves are noted together, a moment later, so that they cost nothing while there is room.
    """

    def __init__(self, topology: Topology, control: Commands, *, young: float = _YOUNG_SECONDS) -> None:
        self._topology = topology
        self._control = control
        self._young = int(young * 1000)
        self._memory: dict[str, Memory] = {}
        #: Values that are not noted yet, by shard, tenant and kind; their last TTL.
        self._saved: dict[tuple[str, str, str], list[str]] = {}
        self._ttl = 0.0
        self._passes: dict[tuple[str, str], _Pass] = {}
        self._scan, self._noting = asyncio.Lock(), asyncio.Lock()
        self._aside: asyncio.Task[None] | None = None
        self._scanned = float("-inf")
        self._refused = float("-inf")
        #: Values deleted so far, when that was last said, and how many it were then.
        self.deleted = 0
        self._said_at, self._said = float("-inf"), 0

    async def take(self, tenant: str, mm_hash: str, nbytes: int, ttl: float, kind: str = "embedding") -> None:
        """Counts a value that will be saved for the tenant, and makes room for it where that is its to do.

        Never fails: without shares values are evicted as they were before there were any.
        """
        if not tenant or time.monotonic() < self._refused + _REFUSED_SECONDS:
            return
        key = keys.embedding(mm_hash)
        try:
            shard = await self._topology.shard_of(key)
            memory = self._memory.get(shard) or await self._read_memory(shard, key)
            if memory.is_stale(time.monotonic()):
                memory = await self._read_memory(shard, key)
            excess = memory.excess(nbytes)
            memory.saved += nbytes
            self._saved.setdefault((shard, tenant, kind), []).append(f"{mm_hash}:{nbytes}")
            self._ttl = ttl
            if excess:
                await self._note((shard, tenant, kind), excess)
        except StoreUnavailable as error:
            self._refuse(error)
            return
        if self._aside is None:
            self._aside = asyncio.create_task(self._work_aside(shard, key), name="shares of the store")

    def _refuse(self, error: StoreUnavailable) -> None:
        self._refused = time.monotonic()
        self._saved.clear()
        logger.warning("shares of the store are not kept for %g s: %s", _REFUSED_SECONDS, error)

    async def _read_memory(self, shard: str, key: str) -> Memory:
        info = await self._topology.memory_of(key)
        used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
        # Values never get the backlog that replicas are sent from, 10 MiB. What waits for one that lags
        # beyond it takes nothing from them: the server does not count it towards its limit.
        buffers = int(info.get("mem_total_replication_buffers", 0))
        aside = int(info.get("mem_not_counted_for_evict", 0))
        backlog = min(max(0, buffers - aside), limit)
        known = self._memory[shard] = Memory(used - max(buffers, aside), limit - backlog, time.monotonic())
        return known

    async def _note(self, at: tuple[str, str, str], excess: int = 0) -> None:
        """Notes the saves there; with an `excess` of bytes the tenant's oldest values are deleted."""
        shard, tenant, kind = at
        values, memory = self._saved.pop(at, []), self._memory[shard]
        if not values:
            return
        facts = (f"{tenant}:{kind}", excess, memory.shared, int(self._ttl) + _INDEX_GRACE)
        bounds = (self._young, _MOST_VALUES, _MOST_BYTES)
        usage = keys.usage(shard, tenant, kind)
        names = await self._control.script(TAKE, usage, *facts, *bounds, *values)
        if names:
            await self._delete(names, memory, tenant)

    async def note(self) -> None:
        """Notes all saves so far, those that are being noted aside too. StoreUnavailable."""
        async with self._noting:
            for at in list(self._saved):
                await self._note(at)

    async def _work_aside(self, shard: str, key: str) -> None:
        """Notes what was saved meanwhile, and now and then looks at memory and counts."""
        try:
            await asyncio.sleep(_NOTE_SECONDS)
            await self.note()
            if time.monotonic() > self._memory[shard].at + _MEMORY_SECONDS:
                await self._read_memory(shard, key)
            if time.monotonic() > self._scanned + _SCAN_SECONDS:
                self._scanned = time.monotonic()
                await self.scan(shard)
        except StoreUnavailable as error:
            self._refuse(error)
        except Exception:
            logger.exception("the shares of the store could not be counted")
        finally:
            self._aside = None

    async def _delete(self, names: Sequence[bytes], memory: Memory, tenant: str) -> None:
        values = [name.decode().rpartition(":") for name in names]
        await self._control.execute_all(
            [("EVAL", DELETE, 1, keys.embedding(mm_hash)) for mm_hash, _, _ in values]
        )
        memory.deleted += sum(int(size) for _, _, size in values)
        self.deleted += len(values)
        if time.monotonic() > self._said_at + _SAY_SECONDS:
            logger.info(
                "the store is near its limit: tenants above their share, %s the last, have given up %d of "
                "their oldest values",
                tenant,
                self.deleted - self._said,
            )
            self._said_at, self._said = time.monotonic(), self.deleted

    async def scan(self, shard: str) -> None:
        """One step of the scan: values that are gone leave some tenants' indexes, and counts are corrected.

        StoreUnavailable.
        """
        async with self._scan:
            await self._step(shard)

    async def _step(self, shard: str) -> None:
        usage, _ = keys.usage(shard, "", "")
        drawn = await self._control.execute("HRANDFIELD", usage, _SCAN_TENANTS)
        begun = [field for at, field in self._passes if at == shard]
        fields = list(dict.fromkeys([*begun, *(field.decode() for field in drawn or ())]))[:_SCAN_TENANTS]
        pairs = [keys.usage(shard, *field.rsplit(":", 1)) for field in fields]
        passes = [self._passes.setdefault((shard, field), _Pass()) for field in fields]
        pages = await self._control.execute_all(
            [
                ("ZSCAN", pair[1], each.cursor, "COUNT", _SCAN_VALUES)
                for pair, each in zip(pairs, passes, strict=True)
            ]
        )
        # A value is counted before it is saved.
        seconds, micros = await self._control.execute("TIME")
        saved = int(seconds) * 1000 + int(micros) // 1000 - self._young
        names = [name.decode() for _, page in pages for name, at in page if float(at) <= saved]
        there = await self._control.execute_all(
            [("EXISTS", keys.embedding(name.rpartition(":")[0])) for name in names]
        )
        gone = {name for name, is_there in zip(names, there, strict=True) if not is_there}
        corrections = []
        for field, pair, each, (cursor, page) in zip(fields, pairs, passes, pages, strict=True):
            own = [name.decode() for name, _ in page]
            each.cursor = int(cursor)
            each.found += sum(int(name.rpartition(":")[2]) for name in own if name not in gone)
            ended = not each.cursor
            if ended:
                del self._passes[shard, field]
            found = each.found if ended else ""
            lost = [name for name in own if name in gone]
            if ended or lost:
                corrections.append(("EVAL", CORRECT, 2, *pair, field, found, *lost))
        await self._control.execute_all(corrections)

    async def close(self) -> None:
        """Ends what is under way."""
        if self._aside is not None:
            self._aside.cancel()
            await asyncio.gather(self._aside, return_exceptions=True)
