"""Leases: which encoder has an item in its tower. Several owners are harmless; saves are SET NX.

A lease is a hash {token, address, incarnation, deadline in ms of the server's clock} without a TTL: keys
with a TTL are the first to be evicted, long before it ends.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from triptych.ec_connector import keys
from triptych.ec_connector.store import EmbeddingStore

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# A lease also goes over when its owner's process has been restarted: the old one holds nothing any more.
_ACQUIRE = (
    _NOW
    + """
local token, address, incarnation, term, replace = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local old = redis.call('HMGET', KEYS[1], 'token', 'address', 'incarnation', 'deadline')
local restarted = old[2] == address and old[3] ~= incarnation
if old[1] and tonumber(old[4]) > now and old[1] ~= replace and not restarted then
  return {old[1], old[2], old[3]}
end
redis.call('HSET', KEYS[1], 'token', token, 'address', address, 'incarnation', incarnation,
  'deadline', string.format('%.0f', now + term))
return {}
"""
)

_RENEW = (
    _NOW
    + """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'deadline', string.format('%.0f', now + ARGV[2]))
return 1
"""
)

_RELEASE = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

_COLLECT = (
    _NOW
    + """
local deadline = tonumber(redis.call('HGET', KEYS[1], 'deadline') or '0')
if deadline + ARGV[1] > now then return 0 end
return redis.call('DEL', KEYS[1])
"""
)


@dataclass(frozen=True, slots=True)
class Lease:
    """Ours until its term ends."""

    mm_hash: str
    token: str


@dataclass(frozen=True, slots=True)
class OwnedBy:
    """Another encoder has the item in its tower; `token` names its lease."""

    address: str
    incarnation: str
    token: str


class Leases:
    """Every method raises StoreUnavailable when the store is down."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._control = store.control

    async def acquire(
        self, mm_hash: str, *, address: str, incarnation: str, term: float, replace_token: str = ""
    ) -> Lease | OwnedBy:
        """The item's lease for `term` seconds, or its live owner.

        `replace_token` is the lease of an owner that failed: it is taken over, whatever its deadline.
        """
        token = uuid.uuid4().hex
        owner: list[bytes] = await self._control.script(
            _ACQUIRE,
            [keys.lease(mm_hash)],
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
        """Another `term` seconds from now; False when the lease is not ours any more."""
        name = [keys.lease(lease.mm_hash)]
        return bool(await self._control.script(_RENEW, name, lease.token, _milliseconds(term)))

    async def release(self, lease: Lease) -> bool:
        """Gives the lease back; False when it was not ours any more, and then leaves it alone."""
        return bool(await self._control.script(_RELEASE, [keys.lease(lease.mm_hash)], lease.token))

    async def collect_dead(self, older_than: float = keys.DEAD_AFTER) -> int:
        """Deletes leases whose deadline is more than `older_than` seconds past; how many."""
        dead, cursor = 0, b"0"
        while True:
            cursor, names = await self._control.execute(
                "SCAN", cursor, "MATCH", keys.LEASE + "*", "COUNT", 500
            )
            if names:
                limit = _milliseconds(older_than)
                dead += sum(
                    await self._control.execute_all([("EVAL", _COLLECT, 1, name, limit) for name in names])
                )
            if int(cursor) == 0:
                return dead


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
