from __future__ import annotations

from pathlib import Path

from support.data.items import NAMESPACE, make_body, make_plan
from support.engine.transfers import counting_relay
from triptych.store.embedding_store import EmbeddingStore


async def test_a_look_up_of_many_items_is_one_round_trip_and_reads_no_body(
    store: EmbeddingStore, store_url: str, tmp_path: Path
) -> None:
    plans = [make_plan(f"item {n}", rows=500, width=500) for n in range(20)]
    for plan in plans[::2]:
        await store.save(plan, make_body(plan), ttl=60)
    with counting_relay(store_url, tmp_path) as (url, round_trips):
        relayed = await EmbeddingStore.connect(url)
        try:
            await relayed.ping()
            before = round_trips()
            found = await relayed.look_up([(plan.mm_hash, NAMESPACE) for plan in plans])
            assert round_trips() - before == 1
        finally:
            await relayed.close()
    assert [plan is not None for plan in found] == [True, False] * 10
