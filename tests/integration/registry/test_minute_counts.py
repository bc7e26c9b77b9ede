"""Limits of API keys that several proxies share by counts in a real store, and without it."""

from __future__ import annotations

import pytest

from triptych.base.errors import RateLimited
from triptych.proxy.auth.keys import KeyLimits, Principal
from triptych.proxy.auth.limits import PrincipalLimits
from triptych.registry.minute_counts import MinuteCounts
from triptych.store import keys
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore


async def ask(limits: PrincipalLimits, principal: Principal, tokens: int = 0) -> None:
    async with limits.admit(principal) as session:
        session.charge(tokens)


class AwayCounts(MinuteCounts):
    """The counts of a store that does not answer while `away`; `asked` counts the calls."""

    away, asked = True, 0

    async def add(self, what: str, principal: str, cost: int, limit: int) -> float:
        self.asked += 1
        if self.away:
            raise StoreUnavailable("no answer")
        return await super().add(what, principal, cost, limit)


async def test_proxies_share_the_requests_and_tokens_of_a_key(store: EmbeddingStore) -> None:
    first, second = (PrincipalLimits(MinuteCounts(store)) for _ in range(2))
    alice, bob = (Principal(name, KeyLimits(requests_per_minute=3)) for name in ("alice", "bob"))
    for limits in (first, second, first):
        await ask(limits, alice)
    for limits in (first, second, second):
        with pytest.raises(RateLimited, match="requests-per-minute: .* 3 requests") as error:
            await ask(limits, alice)
        assert 1 <= error.value.retry_after <= 60
    await ask(second, bob)

    carol = Principal("carol", KeyLimits(tokens_per_minute=10))
    await ask(first, carol, 4)
    await ask(second, carol, 400)
    with pytest.raises(RateLimited, match="tokens-per-minute"):
        await ask(first, carol)


async def test_counts_end_and_keep_two_minutes_at_most(store: EmbeddingStore) -> None:
    key = keys.minute_counts("requests", "alice")
    seconds, _ = await store.control.execute("TIME")
    minute = int(seconds) // 60
    for at, count in ((minute - 3, 7), (minute - 2, 7), (minute - 1, 600)):
        await store.control.execute("HSET", key, at, count)
    counts = MinuteCounts(store)
    # The share of the last minute that is not over yet is above 3 until its last moments.
    assert await counts.add("requests", "alice", 1, 3) > 0 or int(seconds) % 60 > 58
    assert await counts.add("requests", "alice", 1, 0) == 0
    assert len(await store.control.execute("HKEYS", key)) == 2
    assert 0 < await store.control.execute("TTL", key) <= 120


async def test_without_the_store_each_proxy_limits_by_what_it_has_seen_and_asks_again_later(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("triptych.proxy.auth.limits.time.monotonic", lambda: now[0])
    counts = AwayCounts(store)
    limits, alice = PrincipalLimits(counts), Principal("alice", KeyLimits(requests_per_minute=2))
    await ask(limits, alice)
    await ask(limits, alice)
    with pytest.raises(RateLimited):
        await ask(limits, alice)
    assert counts.asked == 1, "a store that does not answer is not asked by every request"
    counts.away, now[0] = False, 106.0
    await ask(limits, alice)
    assert counts.asked == 2, "the counts of all proxies are those that count again"


async def test_what_was_counted_before_the_store_went_away_counts_without_it(store: EmbeddingStore) -> None:
    counts = AwayCounts(store)
    counts.away = False
    limits, alice = PrincipalLimits(counts), Principal("alice", KeyLimits(requests_per_minute=2))
    await ask(limits, alice)
    await ask(limits, alice)
    counts.away = True
    with pytest.raises(RateLimited):
        await ask(limits, alice)
