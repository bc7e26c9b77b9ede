"""The board of autoscaling in the store: each proxy's demand for a pool, its rules, the decision in force.

Pools are named as in the registry. Entries have deadlines by the clock of the server and no TTL. Values
are msgpack; those that Triptych has not written are ignored.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import astuple
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from triptych.base.scaling import PoolDemand, ScalingDecision, ScalingRules, SharedRules
from triptych.store import keys
from triptych.store.control import NOW
from triptych.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

#: Workers and waiting items that an entry may name: more is no entry of ours.
Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
#: Neither infinite nor NaN.
Seconds = Annotated[float, Meta(ge=0.0, le=sys.float_info.max)]
#: Dead entries that one command deletes.
_AT_ONCE = 1000

PUBLISH = (
    NOW
    + """
local proxy, term, value, at_once = unpack(ARGV)
redis.call('HSET', KEYS[1], proxy, value)
redis.call('ZADD', KEYS[2], string.format('%.0f', now + term), proxy)
local moment = string.format('%.0f', now)
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', moment, 'LIMIT', 0, at_once)) do
  redis.call('HDEL', KEYS[1], dead)
  redis.call('ZREM', KEYS[2], dead)
end
local found = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. moment, '+inf')) do
  local each = redis.call('HGET', KEYS[1], name)
  if each then found[#found + 1] = each end
end
return found
"""
)

LEAVE = """
redis.call('HDEL', KEYS[1], ARGV[1])
return redis.call('ZREM', KEYS[2], ARGV[1])
"""

_IN_FORCE = """
local function in_force(pool)
  local deadline = tonumber(redis.call('ZSCORE', KEYS[2], pool) or '0')
  return deadline > now and redis.call('HGET', KEYS[1], pool) or ''
end
"""

READ = NOW + _IN_FORCE + "return in_force(ARGV[1])"

# Of two proxies that decide at once, the one that has seen less does not undo what the other has decided, nor
# does one decide by rules that have been replaced meanwhile.
ANNOUNCE = (
    NOW
    + _IN_FORCE
    + """
local pool, term, value, known, generation = unpack(ARGV)
if in_force(pool) ~= known then return 0 end
if (redis.call('HGET', KEYS[3], pool .. ':generation') or '0') ~= generation then return 0 end
redis.call('HSET', KEYS[1], pool, value)
redis.call('ZADD', KEYS[2], string.format('%.0f', now + term), pool)
return 1
"""
)

# Rules replace those of the expected generation only, so that of two proxies one wins. A flushed board gets
# back what its proxies last read.
AGREE = (
    NOW
    + """
local pool, term, own, known, generation, expected = unpack(ARGV)
local value = redis.call('HGET', KEYS[1], pool) or ''
local at = tonumber(redis.call('HGET', KEYS[1], pool .. ':generation') or '0')
local before = at
if tonumber(generation) > at then
  value, at = known, tonumber(generation)
end
if value ~= own and (expected == 'any' or tonumber(expected) == at) then
  value, at = own, math.max(now, at + 1)
end
if at > before then
  redis.call('HSET', KEYS[1], pool, value)
  redis.call('HSET', KEYS[1], pool .. ':generation', string.format('%.0f', at))
  redis.call('HSET', KEYS[1], pool .. ':until', '0')
end
if value == own then
  redis.call('HSET', KEYS[1], pool .. ':until', string.format('%.0f', now + term))
end
local deadline = tonumber(redis.call('HGET', KEYS[1], pool .. ':until') or '0')
return {value, string.format('%.0f', at), deadline > now and 1 or 0}
"""
)

DECISION_KEYS = [keys.DECISIONS, keys.DECISION_DEADLINES]


class ScalingBoard:
    """The board in the store. Every method raises StoreUnavailable when the store is down."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._control = store.control
        #: The decisions in force as last read, by pool.
        self._known: dict[str, bytes] = {}
        #: The rules and their generation as last read, by pool.
        self._rules: dict[str, tuple[bytes, int]] = {}
        #: Values that were warned of.
        self._warned: set[bytes] = set()

    async def publish(self, proxy_id: str, pool: str, demand: PoolDemand, term: float) -> list[PoolDemand]:
        """Writes this proxy's demand for `term` seconds, and returns that of all live proxies, this one's
        included."""
        values: list[bytes] = await self._control.script(
            PUBLISH, keys.demands(pool), proxy_id, _milliseconds(term), pack_demand(demand), _AT_ONCE
        )
        demands = [(value, unpack_demand(value)) for value in values]
        for value, unpacked in demands:
            if unpacked is None:
                self._warn(pool, value)
        return [unpacked for _, unpacked in demands if unpacked is not None]

    async def withdraw(self, proxy_id: str, pool: str) -> None:
        """The proxy has no demand any more. Idempotent."""
        await self._control.script(LEAVE, keys.demands(pool), proxy_id)

    async def decision(self, pool: str) -> ScalingDecision | None:
        """The decision in force; None where there is none: then the pool keeps the workers that it has."""
        value: bytes = await self._control.script(READ, DECISION_KEYS, pool)
        self._known[pool] = value
        unpacked = unpack_decision(value) if value else None
        if value and unpacked is None:
            self._warn(pool, value)
        return unpacked

    async def announce(self, pool: str, decision: ScalingDecision, term: float) -> bool:
        """Puts the decision in force for `term` seconds.

        False, and nothing is written, where another one is in force or other rules are than when this board
        last read them.
        """
        value = pack_decision(decision)
        _, generation = self._rules.get(pool, (b"", 0))
        written = await self._control.script(
            ANNOUNCE,
            [*DECISION_KEYS, keys.RULES],
            pool,
            _milliseconds(term),
            value,
            self._known.get(pool, b""),
            generation,
        )
        if written:
            self._known[pool] = value
        return bool(written)

    async def agree(
        self, pool: str, own: ScalingRules, expected: int | None, term: float, *, newest: bool = False
    ) -> SharedRules:
        """The rules that all proxies decide by, supported for `term` where they are this proxy's `own`.

        `own` replace those of the generation `expected`, and with `newest` whatever there is.
        """
        known, generation = self._rules.get(pool, (b"", 0))
        ours = msgspec.msgpack.encode(astuple(own))
        replaced = "any" if newest else -1 if expected is None else expected
        value, at, supported = await self._control.script(
            AGREE, [keys.RULES], pool, _milliseconds(term), ours, known, generation, replaced
        )
        self._rules[pool] = value, int(at)
        rules = own if value == ours else unpack_rules(value)
        if rules is None:
            self._warn(pool, value)
        return SharedRules(rules, int(at), bool(supported))

    def _warn(self, pool: str, value: bytes) -> None:
        if value not in self._warned and len(self._warned) < 100:
            self._warned.add(value)
            logger.warning("a scaling entry of %d bytes for pool %.32s cannot be read", len(value), pool)


_demands = msgspec.msgpack.Decoder(tuple[Seconds, Count, Seconds, Seconds, Seconds, Count | None])
_decisions = msgspec.msgpack.Decoder(tuple[Count, Annotated[str, Meta(max_length=40)], bool])
_rules = msgspec.msgpack.Decoder(tuple[Count, Count, float, float, float, float])
T = TypeVar("T")


def pack_demand(demand: PoolDemand) -> bytes:
    """A demand as it is stored."""
    return msgspec.msgpack.encode(astuple(demand))


def unpack_demand(raw: bytes) -> PoolDemand | None:
    """A stored demand; None for a value that Triptych has not written."""
    return _unpacked(_demands, PoolDemand, raw)


def pack_decision(decision: ScalingDecision) -> bytes:
    """A decision as it is stored."""
    return msgspec.msgpack.encode((decision.workers, decision.reason, decision.active))


def unpack_decision(raw: bytes) -> ScalingDecision | None:
    """A stored decision; None for a value that Triptych has not written."""
    return _unpacked(_decisions, ScalingDecision, raw)


def unpack_rules(raw: bytes) -> ScalingRules | None:
    """Stored rules; None for a value that this version of Triptych has not written."""
    return _unpacked(_rules, ScalingRules, raw)


def _unpacked(decoder: msgspec.msgpack.Decoder[Any], make: Callable[..., T], raw: bytes) -> T | None:
    try:
        return make(*decoder.decode(raw))
    except (msgspec.MsgspecError, ValueError):
        return None


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
