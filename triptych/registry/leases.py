"""Leases: which encoder computes an item. Several owners are harmless, since saves are SET NX.

One hash holds {token, incarnation, address} of every lease by mm_hash, a sorted set their deadlines in ms of
the server's clock. Neither has a TTL: keys with a TTL are the first to be evicted, long before it ends.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from triptych.base.hashing import check_mm_hash
from triptych.store import keys
from triptych.store.control import NOW
from triptych.store.embedding_store import EmbeddingStore

#: Leases deleted per command, since the server runs nothing else meanwhile.
_AT_ONCE = 1000

# A lease is also replaced when its owner's process was restarted: the new process does not hold it.
ACQUIRE = (
    NOW
    + """
local item, token, address, incarnation, term, replace = unpack(ARGV)
local old = redis.call('HGET', KEYS[1], item)
if old then
  local held_by, process, place = string.match(old, '^([^\\n]*)\\n([^\\n]*)\\n(.*)$')
  local deadline = tonumber(redis.call('ZSCORE', KEYS[2], item) or '0')
  local restarted = place == address and process ~= incarnation
  if held_by and deadline > now and held_by ~= replace and not restarted then
    return {held_by, place, process}
  end
end
redis.call('HSET', KEYS[1], item, token .. '\\n' .. incarnation .. '\\n' .. address)
redis.call('ZADD', KEYS[2], string.format('%.0f', now + term), item)
return {}
"""
)

_OURS = """
local value = redis.call('HGET', KEYS[1], ARGV[1])
local mark = ARGV[2] .. '\\n'
if not value or string.sub(value, 1, #mark) ~= mark then return 0 end
"""

RENEW = (
    NOW
    + _OURS
    + """
redis.call('ZADD', KEYS[2], string.format('%.0f', now + ARGV[3]), ARGV[1])
return 1
"""
)

RELEASE = (
    _OURS
    + """
redis.call('ZREM', KEYS[2], ARGV[1])
return redis.call('HDEL', KEYS[1], ARGV[1])
"""
)

COLLECT = (
    NOW
    + """
local limit = string.format('%.0f', now - ARGV[1])
local dead = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', limit, 'LIMIT', 0, ARGV[2])
for _, item in ipairs(dead) do
  redis.call('HDEL', KEYS[1], item)
  redis.call('ZREM', KEYS[2], item)
end
return #dead
"""
)

KEYS = [keys.LEASES, keys.LEASE_DEADLINES]


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that this worker holds until its term ends."""

    mm_hash: str
    token: str


@dataclass(frozen=True, slots=True)
class OwnedBy:
    """The encoder that computes the item now; `token` names its lease."""

    address: str
    incarnation: str
    token: str


class Leases:
    """The leases in the store. Every method raises StoreUnavailable when the store is down."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._control = store.control

    async def acquire(
        self, mm_hash: str, *, address: str, incarnation: str, term: float, replace_token: str = ""
    ) -> Lease | OwnedBy:
        """The item's lease for `term` seconds, or its live owner.

        `replace_token` is the lease of an owner that failed: it is replaced even before its deadline.
        """
        token = uuid.uuid4().hex
        owner: list[bytes] = await self._control.script(
            ACQUIRE,
            KEYS,
            check_mm_hash(mm_hash),
            token,
            address,
            incarnation,
            _milliseconds(term),
            replace_token,
        )
        if not owner:
            return Lease(mm_hash, token)
        old_token, old_address, old_incarnation = (word.decode() for word in owner)
        return OwnedBy(old_address, old_incarnation, old_token)

    async def renew(self, lease: Lease, term: float) -> bool:
        """Extends the lease to `term` seconds from now; False when it is not ours any more."""
        held = (lease.mm_hash, lease.token)
        return bool(await self._control.script(RENEW, KEYS, *held, _milliseconds(term)))

    async def release(self, lease: Lease) -> bool:
        """Deletes the lease; False when it is not ours any more, and then it stays."""
        return bool(await self._control.script(RELEASE, KEYS, lease.mm_hash, lease.token))

    async def collect_dead(self, older_than: float = keys.DEAD_AFTER) -> int:
        """Deletes leases that expired more than `older_than` seconds ago; returns their number."""
        dead = 0
        while True:
            collected = int(await self._control.script(COLLECT, KEYS, _milliseconds(older_than), _AT_ONCE))
            dead += collected
            if collected < _AT_ONCE:
                return dead


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


logger = logging.getLogger(__name__)
