"""Whether the embeddings of a request are in the store: asked before vLLM loads them, and when it failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from triptych.base.types import ItemPlan
from triptych.store.bulk_reader import Into
from triptych.store.control import StoreUnavailable
from triptych.store.results import LoadResult, Missing

logger = logging.getLogger(__name__)

#: Pauses while the store does not answer, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
#: Values that are read at once to verify them.
_VERIFIED_AT_ONCE = 2


class ItemStore(Protocol):
    """The part of the embedding store that is used."""

    async def look_up(self, keys_: list[tuple[str, str]]) -> list[ItemPlan | None]: ...

    async def load(self, plan: ItemPlan, into: Into) -> LoadResult: ...


class Embeddings:
    """The store, as a request's items are looked for in it. Waits while it does not answer."""

    def __init__(self, store: ItemStore) -> None:
        self._store = store
        self._reading = asyncio.Semaphore(_VERIFIED_AT_ONCE)

    async def missing(self, plans: Iterable[ItemPlan], *, verify: bool = False) -> dict[str, str]:
        """The keys without a usable value, each with the digest of a damaged one, or "".

        With `verify` all values are read whole: a damaged body has an intact header.
        """
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self._missing(list(plans), verify)
            except StoreUnavailable as error:
                logger.warning("items cannot be looked up, trying again: %s", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _missing(self, plans: list[ItemPlan], verify: bool) -> dict[str, str]:
        suspects = plans
        if not verify:
            found = await self._store.look_up([(plan.mm_hash, plan.namespace) for plan in plans])
            suspects = [plan for plan, there in zip(plans, found, strict=True) if there is None]
        missing = {}
        for plan in suspects:
            async with self._reading:
                result = await self._store.load(plan, _memory)
            if isinstance(result, Missing):
                missing[plan.mm_hash] = result.damaged_digest
        return missing


def _memory(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))
