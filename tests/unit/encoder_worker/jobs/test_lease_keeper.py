"""Leases: replaced where they are ours, renewed only with progress, and never in the way of an encode."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from triptych.encoder_worker.jobs.lease_keeper import LeaseKeeper
from triptych.registry.leases import Lease, OwnedBy
from triptych.store.control import StoreUnavailable

TERM = 0.03


class FakeLeases:
    """Answers `acquire` from a list and counts the rest."""

    def __init__(self, *answers: Lease | OwnedBy | Exception) -> None:
        self.answers = list(answers)
        self.replaced: list[str] = []
        self.renewed = 0
        self.released: list[Lease] = []

    async def acquire(self, mm_hash: str, *, replace_token: str, **_: Any) -> Lease | OwnedBy:
        self.replaced.append(replace_token)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def renew(self, lease: Lease, term: float) -> bool:
        self.renewed += 1
        return True

    async def release(self, lease: Lease) -> bool:
        self.released.append(lease)
        return True


def keeper(leases: Any, *, progress_age: float = 0.0) -> LeaseKeeper:
    return LeaseKeeper(
        leases,
        address="me:1",
        incarnation="now",
        last_progress=lambda: time.monotonic() - progress_age,
        term=TERM,
    )


def later() -> float:
    return time.monotonic() + 60


async def test_another_live_owner_is_named() -> None:
    owner = OwnedBy("other:1", "x", "t")
    leases = FakeLeases(owner)
    assert await keeper(leases).acquire("k", deadline=later, failed_token="f") == owner
    assert leases.replaced == ["f"]


async def test_a_lease_that_this_address_left_behind_is_replaced() -> None:
    leases = FakeLeases(OwnedBy("me:1", "now", "old"), Lease("k", "new"))
    held = keeper(leases)
    assert await held.acquire("k", deadline=later) is None
    assert leases.replaced == ["", "old"]
    await held.close()
    assert leases.released == [Lease("k", "new")]


async def test_without_a_store_there_is_no_lease_and_no_hindrance() -> None:
    held = keeper(FakeLeases(StoreUnavailable("gone")))
    assert await held.acquire("k", deadline=later) is None
    assert held.held == 0


async def test_a_lease_is_renewed_while_there_is_progress() -> None:
    leases = FakeLeases(Lease("k", "t"))
    held = keeper(leases)
    await held.acquire("k", deadline=later)
    async with asyncio.timeout(5):
        while leases.renewed < 3:
            await asyncio.sleep(TERM)
    held.drop("k")
    await held.close()
    assert (held.held, leases.released) == (0, [Lease("k", "t")])


async def test_a_lease_is_not_renewed_after_two_terms_without_progress() -> None:
    leases = FakeLeases(Lease("k", "t"))
    held = keeper(leases, progress_age=3 * TERM)
    await held.acquire("k", deadline=later)
    await asyncio.sleep(3 * TERM)
    assert leases.renewed == 0
    await held.close()


async def test_a_lease_is_not_renewed_past_its_items_deadline() -> None:
    leases = FakeLeases(Lease("k", "t"))
    held = keeper(leases)
    await held.acquire("k", deadline=lambda: time.monotonic() - 1)
    await asyncio.sleep(3 * TERM)
    assert leases.renewed == 0
    await held.close()
