"""Requests and tokens of API keys in the last minute, counted in the store for all proxies together."""

from __future__ import annotations

from triptych.store import keys
from triptych.store.control import NOW
from triptych.store.embedding_store import EmbeddingStore

# One hash for each key and what is counted: a field for each minute. What counts now is this minute's count
# and the share of the last one's that is not over yet. A limit of 0 is none.
COUNT = (
    NOW
    + """
local cost, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local minute, passed = math.floor(now / 60000), now % 60000
local function counted(at) return tonumber(redis.call('HGET', KEYS[1], string.format('%.0f', at)) or '0') end
local used = counted(minute) + counted(minute - 1) * (1 - passed / 60000)
if limit > 0 and used + math.max(cost, 1) > limit then return 60000 - passed end
if cost > 0 then
  redis.call('HINCRBY', KEYS[1], string.format('%.0f', minute), cost)
  redis.call('HDEL', KEYS[1], string.format('%.0f', minute - 2), string.format('%.0f', minute - 3))
  redis.call('EXPIRE', KEYS[1], 120)
end
return 0
"""
)


class MinuteCounts:
    """The counts in the store. StoreUnavailable when it does not answer."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._control = store.control

    async def add(self, what: str, principal: str, cost: int, limit: int) -> float:
        """Counts `cost` and returns 0.0, or without counting the seconds to wait where `limit` is reached."""
        wait = await self._control.script(COUNT, [keys.minute_counts(what, principal)], cost, limit)
        return int(wait) / 1000
