"""The part of the store that KV blocks may take: who has most of it gives up its oldest for what is new."""

from __future__ import annotations

import time

from triptych.store import keys
from triptych.store.control import NOW, Commands
from triptych.store.shares import DELETE
from triptych.store.topology.topology import Topology

#: Seconds for which a server's limit is taken as known.
_LIMIT_SECONDS = 10.0
#: Values that one save deletes at most.
_MOST_VALUES = 64
#: Seconds that an index outlives its values: a saver renews it.
_INDEX_GRACE = 600

#: Counts the value ARGV[5] for the tenant ARGV[1]. While all tenants have more than ARGV[2] bytes, the one
#: with most gives up its oldest: they are the reply. Values that the server has evicted are counted until
#: they are the oldest.
TAKE_KV = (
    NOW
    + """
if redis.call('ZADD', KEYS[2], now, ARGV[5]) == 1 then
  redis.call('HINCRBY', KEYS[1], ARGV[1], tonumber(string.match(ARGV[5], '%d+$')))
end
redis.call('EXPIRE', KEYS[2], ARGV[3])
local counts, total, named = {}, 0, {}
local flat = redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do
  counts[flat[i]] = tonumber(flat[i + 1])
  total = total + counts[flat[i]]
end
local before = string.sub(KEYS[1], 1, -6) .. 'items:'
while total > tonumber(ARGV[2]) and #named < tonumber(ARGV[4]) do
  local most = nil
  for tenant, bytes in pairs(counts) do
    if not most or bytes > counts[most] or (bytes == counts[most] and tenant < most) then most = tenant end
  end
  if not most then break end
  local oldest = redis.call('ZRANGE', before .. most, 0, 0)[1]
  if not oldest then
    redis.call('HDEL', KEYS[1], most)
    total = total - counts[most]
    counts[most] = nil
  elseif oldest == ARGV[5] then
    break
  else
    local bytes = tonumber(string.match(oldest, '%d+$'))
    redis.call('ZREM', before .. most, oldest)
    redis.call('HINCRBY', KEYS[1], most, -bytes)
    total, counts[most] = total - bytes, counts[most] - bytes
    named[#named + 1] = oldest
  end
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
        facts = (tenant, budget, int(ttl) + _INDEX_GRACE, _MOST_VALUES, f"{mm_hash}:{nbytes}")
        names = await self._control.script(TAKE_KV, keys.kv_usage(shard, tenant), *facts)
        gone = [name.decode().rpartition(":")[0] for name in names]
        await self._control.execute_all([("EVAL", DELETE, 1, keys.embedding(one, keys.KV)) for one in gone])
        self.deleted += len(gone)
        return True

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
        info = await self._topology.on_owner(key, 0, lambda server, _: server.info("memory"))
        limit = int(info.get("maxmemory", 0))
        self._limits[shard] = limit, time.monotonic()
        return limit
