"""The part of the store that KV blocks may take: who has most of it gives up its oldest for what is new."""

from __future__ import annotations

import time

from triptych.store import keys
from triptych.store.control import NOW, Commands
from triptych.store.shares import DELETE
from triptych.store.topology.topology import Topology

#: Seconds for which a server's limit is taken as known.
_LIMIT_SECONDS = 10.0
#: Values that one save deletes at most, in so many rounds.
_MOST_VALUES, _MOST_ROUNDS = 64, 4
#: Seconds that an index outlives its values: a saver renews it.
_INDEX_GRACE = 600

#: `total` bytes of all tenants, and who has `most` of them.
_COUNTED = """
local counts, total, most = {}, 0, nil
local flat = redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do
  local bytes = tonumber(flat[i + 1])
  counts[flat[i]], total = bytes, total + bytes
  if not most or bytes > counts[most] or (bytes == counts[most] and flat[i] < most) then most = flat[i] end
end
"""

#: Counts the value ARGV[2] for the tenant ARGV[1]. The reply is the tenant with most where all have more than
#: ARGV[3] bytes, else nothing.
COUNT_KV = (
    NOW
    + """
if redis.call('ZADD', KEYS[2], now, ARGV[2]) == 1 then
  redis.call('HINCRBY', KEYS[1], ARGV[1], tonumber(string.match(ARGV[2], '%d+$')))
end
redis.call('EXPIRE', KEYS[2], ARGV[4])
"""
    + _COUNTED
    + """
return total > tonumber(ARGV[3]) and {most} or {}
"""
)

#: While all tenants have more than ARGV[3] bytes, and ARGV[1] most of them, its oldest values but ARGV[2]
#: leave its index: they are the reply, behind the tenant that is next. Values that the server has evicted
#: are counted until they are the oldest.
GIVE_UP_KV = (
    _COUNTED
    + """
local named, left, second = {''}, tonumber(ARGV[4]), 0
for tenant, bytes in pairs(counts) do
  if tenant ~= ARGV[1] and bytes > second then second = bytes end
end
for _, value in ipairs(redis.call('ZRANGE', KEYS[2], 0, left - 1)) do
  local own = counts[ARGV[1]] or 0
  if total <= tonumber(ARGV[3]) or own < second or value == ARGV[2] then break end
  local bytes = tonumber(string.match(value, '%d+$'))
  redis.call('ZREM', KEYS[2], value)
  redis.call('HINCRBY', KEYS[1], ARGV[1], -bytes)
  counts[ARGV[1]], total = own - bytes, total - bytes
  named[#named + 1] = value
end
if redis.call('EXISTS', KEYS[2]) == 0 then
  total = total - (counts[ARGV[1]] or 0)
  counts[ARGV[1]] = nil
  redis.call('HDEL', KEYS[1], ARGV[1])
end
if total > tonumber(ARGV[3]) then
  local next = nil
  for tenant, bytes in pairs(counts) do
    if not next or bytes > counts[next] or (bytes == counts[next] and tenant < next) then next = tenant end
  end
  if next then named[1] = 'of ' .. next end
end
return named
"""
)

#: Values ARGV[1] and on were found: the last that their tenant gives up.
TOUCH_KV = (
    NOW
    + """
for i = 1, #ARGV do redis.call('ZADD', KEYS[1], 'XX', now, ARGV[i]) end
"""
)


class KVBudget:
    """The budget of KV blocks as one process keeps it: `share` of the memory of each server of the store.

    A server without a limit has none. With a `share` of 1 nothing is counted: the server evicts by itself.
    """

    def __init__(self, topology: Topology, control: Commands, share: float) -> None:
        self._topology = topology
        self._control = control
        self._share = share
        self._limits: dict[str, tuple[int, float]] = {}
        #: Values deleted so far.
        self.deleted = 0

    async def take(self, tenant: str, mm_hash: str, nbytes: int, ttl: float) -> bool:
        """Counts a value that will be saved, once room is made for it; False for one that has no room.

        StoreUnavailable.
        """
        if self._share >= 1:
            return True
        key = keys.embedding(mm_hash, keys.KV)
        shard = await self._topology.shard_of(key)
        limit = await self._limit(shard, key)
        budget = int(self._share * limit)
        if not limit:
            return True
        if nbytes > budget:
            return False
        value = f"{mm_hash}:{nbytes}"
        usage = keys.kv_usage(shard, tenant)
        above = await self._control.script(COUNT_KV, usage, tenant, value, budget, int(ttl) + _INDEX_GRACE)
        most = above[0].decode() if above else None
        for _ in range(_MOST_ROUNDS):
            if most is None:
                break
            most = await self._give_up(shard, most, value, budget)
        return True

    async def _give_up(self, shard: str, tenant: str, value: str, budget: int) -> str | None:
        """Deletes the tenant's oldest values; the tenant that is next, if any has to be."""
        usage = keys.kv_usage(shard, tenant)
        following, *names = await self._control.script(GIVE_UP_KV, usage, tenant, value, budget, _MOST_VALUES)
        gone = [name.decode().rpartition(":")[0] for name in names]
        await self._control.execute_all([("EVAL", DELETE, 1, keys.embedding(one, keys.KV)) for one in gone])
        self.deleted += len(gone)
        return following.decode().removeprefix("of ") if following else None

    async def touch(self, tenant: str, values: list[tuple[str, int]]) -> None:
        """These values (mm_hash, bytes) were found, and stay longer than others. StoreUnavailable."""
        by_shard: dict[str, list[str]] = {}
        for mm_hash, nbytes in values if self._share < 1 else ():
            shard = await self._topology.shard_of(keys.embedding(mm_hash, keys.KV))
            by_shard.setdefault(shard, []).append(f"{mm_hash}:{nbytes}")
        await self._control.execute_all(
            [
                ("EVAL", TOUCH_KV, 1, keys.kv_usage(shard, tenant)[1], *names)
                for shard, names in by_shard.items()
            ]
        )

    async def _limit(self, shard: str, key: str) -> int:
        """The server's maxmemory; 0: none."""
        known, at = self._limits.get(shard, (0, float("-inf")))
        if time.monotonic() < at + _LIMIT_SECONDS:
            return known
        info = await self._topology.memory_of(key)
        limit = int(info.get("maxmemory", 0))
        self._limits[shard] = limit, time.monotonic()
        return limit
