"""The store's client: its loop ends in order."""

from __future__ import annotations

import asyncio

from triptych.ec_connector.connectors.store_client import StoreClient
from triptych.store.embedding_store import EmbeddingStore


async def test_transfers_end_before_the_store_is_closed(store_url, monkeypatch):
    order: list[str] = []
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    close = EmbeddingStore.close

    async def closed(self: EmbeddingStore) -> None:
        order.append("closed")
        await close(self)

    async def transfer() -> None:
        await client.store()
        loop.call_soon_threadsafe(begun.set)
        try:
            await asyncio.sleep(60)
        finally:
            order.append("transfer ended")

    monkeypatch.setattr(EmbeddingStore, "close", closed)
    client = StoreClient(store_url)
    client.submit(transfer())
    async with asyncio.timeout(20):
        await begun.wait()
    await asyncio.to_thread(client.close)
    assert order == ["transfer ended", "closed"]
