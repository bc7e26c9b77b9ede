"""The text of GET /metrics, which takes longer to make than a token to relay."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, generate_latest


class MetricsPage:
    """Made beside the event loop, once at a time. Requests that come meanwhile share the next one.

    So a text is never older than the request for it, and no number of clients makes more than one at once.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._making = asyncio.Lock()
        self._next: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        if self._next is None:
            self._next = asyncio.create_task(self._make())
        return await asyncio.shield(self._next)

    async def _make(self) -> bytes:
        async with self._making:
            self._next = None
            return await asyncio.to_thread(generate_latest, self._registry)
