"""What a store has been asked to do, by its own account."""

from __future__ import annotations

from collections import Counter
from typing import Any

from triptych.store.embedding_store import EmbeddingStore


async def commands(store: EmbeddingStore) -> Counter[str]:
    """Calls of every command since the server's start; those made by scripts count, too."""
    told: dict[str, Any] = await store.control.execute("INFO", "commandstats")
    return Counter({name.removeprefix("cmdstat_"): int(stat["calls"]) for name, stat in told.items()})
