"""A quota: one holder never shuts the others out, claims wait in turn, and holds have deadlines."""

import asyncio

import pytest

from support.clock import Clock
from triptych.proxy.quotas.quota import Quota, QuotaExceeded, QuotaSpec


def make(capacity: int = 64, clock: Clock | None = None, **facts: float) -> Quota:
    spec = QuotaSpec("fetches", capacity, "fetches", "places for fetches", "--media-fetches", "429", **facts)  # type: ignore[arg-type]
    return Quota(spec, clock or Clock())


def take_all(quota: Quota, holder: str) -> int:
    """One unit after the other, until one is refused."""
    taken = 0
    while quota.fits(holder, 1):
        quota.hold(holder, 1)
        taken += 1
    return taken


def test_one_holder_has_half_and_each_further_one_half_of_what_is_left() -> None:
    quota = make(64)
    assert [take_all(quota, name) for name in "abcdefgh"] == [32, 16, 8, 4, 2, 1, 1, 0]


def test_a_holder_with_its_share_is_refused_by_name_while_another_is_served() -> None:
    quota = make(4)
    quota.hold("a", 2)
    with pytest.raises(QuotaExceeded, match=r"this key holds its share .* \(--media-fetches\)"):
        quota.hold("a", 1)
    quota.hold("b", 1)


def test_without_keys_everybody_together_may_have_all_of_it() -> None:
    quota = make(4)
    quota.hold("", 4)
    with pytest.raises(QuotaExceeded, match="is in use"):
        quota.hold("", 1)


def test_the_largest_claim_fits_a_holder_that_has_nothing() -> None:
    quota = make(4, largest=3)
    quota.hold("a", 3)
    assert not quota.fits("a", 1)


def test_what_is_given_back_is_free_again_once() -> None:
    quota = make(4)
    hold = quota.hold("", 4)
    hold.remove(1)
    assert quota.free == 1
    hold.close()
    hold.close()
    hold.remove(1)
    assert (quota.free, quota.held("")) == (4, 0)


def test_more_that_does_not_fit_leaves_a_hold_as_it_was() -> None:
    quota = make(4)
    hold = quota.hold("", 3)
    with pytest.raises(QuotaExceeded):
        hold.add(2)
    assert (hold.amount, quota.used) == (3, 3)


async def test_claims_wait_in_turn_and_one_holder_cannot_fill_the_queue() -> None:
    quota = make(2, wait_seconds=60.0)
    first, second = quota.hold("a", 1), quota.hold("b", 1)
    served: list[str] = []

    async def claim(holder: str) -> None:
        hold = await quota.wait(holder, 1)
        served.append(holder)
        hold.close()

    claims = [asyncio.create_task(claim(holder)) for holder in ("c", "c", "c", "d")]
    await asyncio.sleep(0)
    first.close()
    await asyncio.gather(*claims)
    assert served == ["c", "d", "c", "c"]
    second.close()
    assert quota.used == 0


async def test_a_large_claim_is_not_overtaken_for_ever_by_small_ones() -> None:
    quota = make(8, wait_seconds=60.0, largest=8)
    small = quota.hold("a", 4)
    large = asyncio.create_task(quota.wait("b", 8))
    await asyncio.sleep(0)
    late = asyncio.create_task(quota.wait("c", 4))
    await asyncio.sleep(0)
    assert not large.done() and not late.done()
    small.close()
    (await large).close()
    (await late).close()
    assert quota.used == 0


async def test_a_claim_that_waits_too_long_is_refused_and_holds_nothing() -> None:
    quota = make(1, wait_seconds=0.001)
    hold = quota.hold("a", 1)
    with pytest.raises(QuotaExceeded):
        await quota.wait("b", 1)
    hold.close()
    assert quota.used == 0


async def test_a_cancelled_claim_gives_its_turn_to_the_next() -> None:
    quota = make(1, wait_seconds=60.0)
    hold = quota.hold("a", 1)
    gone, stays = (asyncio.create_task(quota.wait(name, 1)) for name in "bc")
    await asyncio.sleep(0)
    hold.close()  # the turn is b's, who leaves before it runs
    gone.cancel()
    (await stays).close()
    assert quota.used == 0


def test_a_hold_ends_by_its_deadlines_without_progress_and_in_total() -> None:
    clock, ended = Clock(), []
    quota = make(8, clock, idle_seconds=10.0, total_seconds=60.0)
    silent = quota.hold("a", 1, lambda: ended.append("silent"))
    slow = quota.hold("b", 1, lambda: ended.append("slow"))
    for clock.now in range(0, 70, 5):
        slow.progress()
        quota.sweep()
    assert ended == ["silent", "slow"]
    assert silent.expired and slow.expired and quota.used == 2, "the owners close what they hold"


async def test_a_claim_that_is_cancelled_in_the_moment_of_its_turn_lets_the_next_one_have_it() -> None:
    quota = make(1, wait_seconds=60.0)
    hold = quota.hold("a", 1)
    gone, stays = (asyncio.create_task(quota.wait(name, 1)) for name in "bc")
    await asyncio.sleep(0)
    gone.cancel()
    hold.close()
    (await stays).close()
    assert gone.cancelled() and quota.used == 0


def test_the_only_hold_of_a_holder_may_grow_to_the_largest_and_a_second_one_may_not() -> None:
    quota = make(4, largest=3)
    first = quota.hold("a")
    for _ in range(3):
        first.add(1)
    first.remove(1)
    with pytest.raises(QuotaExceeded, match="its share"):
        quota.hold("a").add(1)


def test_the_only_key_of_a_proxy_may_have_all_and_a_peer_never() -> None:
    """Nor may who comes without a key, which the page and probes do not ask for."""
    facts = ("q", 4, "places", "places", "", "429")
    assert take_all(Quota(QuotaSpec(*facts), shared=lambda: False), "@127.0.0.1") == 2  # type: ignore[arg-type]
    assert take_all(Quota(QuotaSpec(*facts), shared=lambda: False), "a") == 4  # type: ignore[arg-type]
    assert take_all(Quota(QuotaSpec(*facts, per="peer"), shared=lambda: False), "a") == 2  # type: ignore[arg-type]


def test_a_settled_hold_has_no_deadline() -> None:
    clock, ended = Clock(), []
    quota = make(8, clock, idle_seconds=10.0)
    quota.hold("a", 1, lambda: ended.append("a")).settled = True
    clock.now = 20.0
    quota.sweep()
    assert ended == []
