"""The part of a real store that KV blocks may take: filled with them, it keeps every embedding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.data.items import make_body, make_plan
from support.stores.server import StoreServer
from triptych.base.types import ItemPlan
from triptych.store import keys
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.kv_budget import KVBudget

ALICE, BOB = "a" * 16, "b" * 16
MEMORY = 16 << 20
ROWS, WIDTH = 64, 1024
NBYTES = ROWS * WIDTH * 4
SHARE = 0.25


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[tuple[EmbeddingStore, EmbeddingStore]]:
    """The embeddings and the KV blocks of a store of 16 MiB."""
    server = StoreServer(tmp_path / "store", maxmemory=MEMORY)
    server.start()
    embeddings = await EmbeddingStore.connect(server.url)
    blocks = await EmbeddingStore.connect(server.url, kind=keys.KV)
    yield embeddings, blocks
    await blocks.close()
    await embeddings.close()
    server.kill()


def plans_of(name: str, count: int) -> list[ItemPlan]:
    return [make_plan(f"{name} {n}", rows=ROWS, width=WIDTH) for n in range(count)]


async def save_blocks(store: EmbeddingStore, budget: KVBudget, plans: list[ItemPlan], tenant: str) -> None:
    for plan in plans:
        assert await budget.take(tenant, plan.mm_hash, plan.nbytes, 600)
        await store.save(plan, make_body(plan), ttl=600)


async def held(store: EmbeddingStore, plans: list[ItemPlan], kind: str) -> int:
    """How many of these are stored; the look does not renew them."""
    asked = [("EXISTS", keys.embedding(plan.mm_hash, kind)) for plan in plans]
    return sum(await store.control.execute_all(asked))


async def test_a_store_that_is_filled_with_kv_keeps_every_live_embedding(stores) -> None:
    embeddings, blocks = stores
    pictures = plans_of("picture", 30)
    for plan in pictures:
        await embeddings.save(plan, make_body(plan), ttl=600)
    budget = KVBudget(blocks.topology, blocks.control, SHARE)
    prompts = plans_of("prompt", 200)
    await save_blocks(blocks, budget, prompts, ALICE)
    assert await held(embeddings, pictures, keys.EMBEDDING) == 30
    kept = await held(blocks, prompts, keys.KV)
    assert SHARE * MEMORY - 2 * NBYTES < kept * NBYTES <= SHARE * MEMORY
    assert (await blocks.memory()).evicted_keys == 0
    assert await held(blocks, prompts[-1:], keys.KV) == 1
    assert budget.deleted == 200 - kept


async def test_the_tenant_with_most_gives_way_to_a_new_one(stores) -> None:
    _, blocks = stores
    budget = KVBudget(blocks.topology, blocks.control, SHARE)
    alices, bobs = plans_of("alice", 40), plans_of("bob", 6)
    await save_blocks(blocks, budget, alices, ALICE)
    await save_blocks(blocks, budget, bobs, BOB)
    assert await held(blocks, bobs, keys.KV) == 6
    assert await held(blocks, alices, keys.KV) >= 8


async def test_what_is_found_again_stays_longer_than_what_is_not(stores) -> None:
    _, blocks = stores
    budget = KVBudget(blocks.topology, blocks.control, SHARE)
    prompts = plans_of("prompt", 30)
    await save_blocks(blocks, budget, prompts[:10], ALICE)
    for plan in prompts[10:]:
        await asyncio.sleep(0.002)
        await budget.touch(ALICE, [(prompts[0].mm_hash, NBYTES)])
        await save_blocks(blocks, budget, [plan], ALICE)
    assert await held(blocks, prompts[:1], keys.KV) == 1
    assert await held(blocks, prompts[1:10], keys.KV) == 0


async def test_two_savers_of_one_value_count_it_once_and_a_larger_one_than_the_budget_is_refused(
    stores,
) -> None:
    _, blocks = stores
    budgets = [KVBudget(blocks.topology, blocks.control, SHARE) for _ in range(2)]
    (plan,) = plans_of("prompt", 1)
    await asyncio.gather(*(save_blocks(blocks, budget, [plan], ALICE) for budget in budgets))
    usage, _ = keys.kv_usage("0", ALICE)
    assert await blocks.control.execute("HGET", usage, ALICE) == str(NBYTES).encode()
    assert not await budgets[0].take(ALICE, plan.mm_hash, int(SHARE * MEMORY) + 1, 600)
