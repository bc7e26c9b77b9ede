"""Few classes of the proxy know items: while a request is in flight only these have its mm_hash in what they
change."""

from __future__ import annotations

import asyncio
from typing import Any

from support.fakes.fake_workers import key_of, picture, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.owners import owners
from support.waiting import until
from triptych.proxy.pd.link import PDLink

OWNERS = {"Lifecycle", "KnownItems", "PDLink"}
FIRST, SECOND = picture("one"), picture("two")


async def test_an_item_has_three_owners_in_the_proxy(store, monkeypatch):
    keys, seen, notify = {key_of(FIRST), key_of(SECOND)}, set[str](), PDLink.notify
    async with FakeCluster(store, live=True) as cluster:
        encoder, worker = cluster.encoders[0], cluster.pd_workers[0]

        def poll() -> None:
            for root in (cluster.dispatcher, cluster.live):
                seen.update(owners(root, keys, without=store))

        def notified(link: PDLink, *what: Any) -> None:
            notify(link, *what)
            poll()

        monkeypatch.setattr(PDLink, "notify", notified)
        for gate in (encoder.gate, encoder.tower, worker.gate):
            gate.clear()
        asked = [asyncio.create_task(cluster.ask(user("?", FIRST, SECOND), n=n)) for n in (1, 2)]
        await until(lambda: len(encoder.media) == 2, "both items at the encoder")
        poll()
        encoder.gate.set()
        await until(lambda: encoder.runs == 2, "both items in the tower")
        poll()
        encoder.tower.set()
        await until(lambda: all(request.lifecycle.items for request in cluster.dispatcher._requests.values()))
        await until(lambda: not cluster.dispatcher.jobs.items.published_bytes, "the loads")
        poll()
        worker.gate.set()
        for answer in await asyncio.gather(*asked):
            assert answer.choices[0].message.content == whole_text(8)
        poll()
    print(sorted(seen))
    assert seen == OWNERS
