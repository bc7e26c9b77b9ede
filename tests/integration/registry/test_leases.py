"""Leases, and counts of a minute that proxies share."""

from __future__ import annotations

import asyncio

import pytest

from support.data.items import make_plan
from support.stores.commands import commands
from triptych.base.errors import InvalidRequest, RateLimited
from triptych.proxy.auth.keys import KeyLimits, Principal
from triptych.proxy.auth.limits import PrincipalLimits
from triptych.registry import minute_counts
from triptych.registry.leases import Lease, Leases, OwnedBy
from triptych.registry.minute_counts import MinuteCounts
from triptych.store import keys
from triptych.store.control import NOW, StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

HASH = make_plan().mm_hash


async def acquire(leases: Leases, who: str, term: float = 60, replace_token: str = "") -> Lease | OwnedBy:
    return await leases.acquire(
        HASH, address=f"{who}:1", incarnation=f"{who}-1", term=term, replace_token=replace_token
    )


async def owned(leases: Leases, who: str, term: float = 60, replace_token: str = "") -> Lease:
    lease = await acquire(leases, who, term, replace_token)
    assert isinstance(lease, Lease)
    return lease


async def test_the_first_owns_the_item_and_the_second_learns_who(store: EmbeddingStore) -> None:
    leases = Leases(store)
    lease = await owned(leases, "a")
    assert await acquire(leases, "b") == OwnedBy("a:1", "a-1", lease.token)


async def test_of_many_at_once_one_owns_the_item(store: EmbeddingStore) -> None:
    leases = Leases(store)
    results = await asyncio.gather(*(acquire(leases, f"e{n}") for n in range(16)))
    assert sum(isinstance(result, Lease) for result in results) == 1


async def test_a_lease_ends_with_its_term_and_its_old_owner_cannot_touch_the_next(store):
    leases = Leases(store)
    old = await owned(leases, "a", term=0.01)
    await asyncio.sleep(0.05)
    new = await owned(leases, "b")
    assert not await leases.renew(old, 60)
    assert not await leases.release(old)
    assert await leases.renew(new, 60)


async def test_a_hung_owner_is_replaced_by_naming_its_token(store: EmbeddingStore) -> None:
    leases = Leases(store)
    hung = await owned(leases, "a")
    new = await owned(leases, "b", replace_token=hung.token)
    assert not await leases.renew(hung, 60)
    assert await acquire(leases, "c", replace_token=hung.token) == OwnedBy("b:1", "b-1", new.token)


async def test_the_lease_of_a_process_that_was_restarted_goes_to_its_successor(store):
    leases = Leases(store)
    await owned(leases, "a")
    again = await leases.acquire(HASH, address="a:1", incarnation="a-2", term=60)
    assert isinstance(again, Lease)


async def test_only_leases_long_past_their_deadline_are_collected(store: EmbeddingStore) -> None:
    leases = Leases(store)
    for n in range(20):
        await leases.acquire(make_plan(f"dead {n}").mm_hash, address="a", incarnation="i", term=-700)
        await leases.acquire(make_plan(f"late {n}").mm_hash, address="a", incarnation="i", term=-10)
        await leases.acquire(make_plan(f"live {n}").mm_hash, address="a", incarnation="i", term=60)
    assert await leases.collect_dead() == 20
    assert await store.control.execute("HLEN", keys.LEASES) == 40
    assert await store.control.execute("ZCARD", keys.LEASE_DEADLINES) == 40


@pytest.mark.parametrize("name", ["", "../escaped", "AB" * 32, "ab" * 31, "ab" * 32 + "\n"])
async def test_names_that_are_no_hash_get_no_lease(store: EmbeddingStore, name: str) -> None:
    with pytest.raises(InvalidRequest):
        await Leases(store).acquire(name, address="a", incarnation="i", term=60)


async def test_the_dead_leases_are_found_without_a_search_through_the_store(store: EmbeddingStore) -> None:
    leases = Leases(store)
    for n in range(300):
        await store.control.execute("SET", f"other:{n}", "x")
        await leases.acquire(make_plan(f"live {n}").mm_hash, address="a", incarnation="i", term=60)
    for n in range(3):
        await leases.acquire(make_plan(f"dead {n}").mm_hash, address="a", incarnation="i", term=-700)
    before = await commands(store)
    assert await leases.collect_dead() == 3
    spent = await commands(store) - before
    assert spent["scan"] == 0
    # One script, and two deletions for each dead lease.
    assert spent["eval"] == spent["zrangebyscore"] == 1
    assert spent["hdel"] == spent["zrem"] == 3


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


async def test_counts_end_and_keep_two_minutes_at_most(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.minute_counts("requests", "alice")
    minute = 10
    # The store's clock stands in the middle of it.
    assert NOW in minute_counts.COUNT
    now = f"local now = {(minute + 0.5) * 60_000:.0f}"
    monkeypatch.setattr(minute_counts, "COUNT", minute_counts.COUNT.replace(NOW, now))
    for at, count in ((minute - 3, 7), (minute - 2, 7), (minute - 1, 600)):
        await store.control.execute("HSET", key, at, count)
    counts = MinuteCounts(store)
    assert await counts.add("requests", "alice", 1, 300) == 30.0, "half of the last minute counts"
    assert await counts.add("requests", "alice", 1, 301) == 0, "no more than half of it counts"
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
