"""No encoder is left while requests have room reserved at PD workers for what nobody has encoded yet."""

from __future__ import annotations

import asyncio

import pytest

from support.fakes.fake_workers import key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.proxy.requests import item_supply

STORED, NEW = picture("stored"), picture("new")


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_supply, "GRACE_SECONDS", 0.5)


async def admitted_without_encoders(cluster: FakeCluster, *pictures: bytes) -> asyncio.Task[str]:
    """A request that fills its PD worker and whose pictures, planned, nobody encodes any more."""
    assert await cluster.stream(user("?", STORED)) == whole_text(8)
    encoder, pd = cluster.encoders[0], cluster.pd_workers[0]
    pd.room = 1
    encoder.tower.clear()
    runs = encoder.runs
    asked = asyncio.create_task(cluster.stream(user("first", *pictures)))
    await until(lambda: encoder.runs == runs + 1, "the tower's turn")
    await until(lambda: pd.reserved == 1, "its room at the PD worker")
    await encoder.kill()
    encoder.tower.set()
    return asked


async def test_a_request_that_nobody_can_encode_for_gives_its_room_to_one_whose_item_is_stored(cluster):
    encoder, pd = cluster.encoders[0], cluster.pd_workers[0]
    first = await admitted_without_encoders(cluster, NEW)
    assert await cluster.stream(user("second", STORED)) == whole_text(8)
    assert not first.done()
    await until(lambda: pd.reserved == 0, "all room to be free")
    await encoder.start()
    assert await first == whole_text(8)
    attempts = [s.attempt for s in pd.submits if s.items[0].plan.mm_hash == key_of(NEW)]
    assert attempts == sorted(set(attempts))
    assert len(attempts) == 2


async def test_requests_that_gave_their_room_back_have_it_again_in_the_order_of_their_arrival(cluster):
    encoder, pd = cluster.encoders[0], cluster.pd_workers[0]
    first = await admitted_without_encoders(cluster, NEW)
    await until(lambda: pd.reserved == 0 and not pd.requests, "the first one's room to be free")
    pd.admission.clear()
    later = asyncio.create_task(cluster.stream(user("later", STORED)))
    await until(lambda: len(pd.requests) == 1)
    pd.room = 0
    await encoder.start()
    await until(lambda: len(pd.requests) == 2)
    latest = asyncio.create_task(cluster.stream(user("latest", STORED)))
    await until(lambda: len(pd.requests) == 3)
    pd.admission.set()
    pd.room = 1
    assert await asyncio.gather(first, later, latest) == [whole_text(8)] * 3
