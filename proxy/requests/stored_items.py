"""Look-ups of items in the embedding store, and the epoch in which each was last known to be there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from triptych.errors import TriptychError
from triptych.proxy.requests.request import InFlightRequest
from triptych.types import ItemPlan

STORE_RETRY_SECONDS = 0.25


class StoreView(Protocol):
    """The embedding store's part that the proxy reads."""

    async def look_up(self, keys: Sequence[tuple[str, str]]) -> list[ItemPlan | None]: ...
    async def epoch(self) -> str: ...
    @property
    def clock_jumps(self) -> int: ...


class StoredItems:
    """Asks the store which items of a request it holds, and whether a lost one was evicted.

    An item that was stored in another epoch of the store (it was flushed or restarted), or before a jump of
    its clock (all that is stored expires), was not evicted: its loss says nothing about the PD workers' pace.
    """

    def __init__(self, store: StoreView, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock

    async def look_up(self, request: InFlightRequest, mm_hashes: Sequence[str]) -> Mapping[str, ItemPlan]:
        """Plans of the items that are stored, in one round trip; repeated while the store is down and the
        request has not ended."""
        keys = [(key, request.bound.namespace) for key in mm_hashes]
        while not request.lifecycle.ended:
            request.looked_up = self._clock()
            try:
                found = await self._store.look_up(keys)
                epoch = await self._store.epoch()
            except TriptychError:
                request.lifecycle.store_unavailable()
                await asyncio.sleep(STORE_RETRY_SECONDS)
                continue
            plans = {plan.mm_hash: plan for plan in found if plan is not None}
            for key in plans:
                request.origins[key] = "store"
                self.note(request, key, epoch)
            return plans
        return {}

    def note(self, request: InFlightRequest, mm_hash: str, epoch: str) -> None:
        """The item is stored now, in this epoch of the store."""
        request.epochs[mm_hash] = (epoch, self._store.clock_jumps)

    async def evicted(self, request: InFlightRequest, mm_hashes: Sequence[str]) -> frozenset[str]:
        """Those of the lost items that were evicted, as far as the store answers."""
        try:
            epoch = await self._store.epoch()
        except TriptychError:
            return frozenset()
        now = (epoch, self._store.clock_jumps)
        return frozenset(key for key in mm_hashes if epoch and request.epochs.get(key, now) == now)
