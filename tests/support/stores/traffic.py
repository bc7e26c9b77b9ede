"""Load on a store: items that are looked up, saved when they are missing, and loaded, without end."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from types import TracebackType

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from triptych.base.types import ItemPlan
from triptych.store.bulk import Missing, scattered
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore


@dataclass
class Traffic:
    """Tasks that each serve one item after the other, with the stores of a writer and of a reader.

    `wrong` are items that were loaded with other bytes than saved, or that failed otherwise than by a miss or
    an unavailable store.
    """

    writer: EmbeddingStore
    reader: EmbeddingStore
    plans: list[ItemPlan] = field(
        default_factory=lambda: [make_plan(f"traffic {n}", rows=60 + 7 * n, width=64) for n in range(40)]
    )
    tasks: int = 6
    served: int = 0
    #: Items that were missing, and were saved.
    encoded: set[str] = field(default_factory=set)
    misses: int = 0
    unavailable: int = 0
    wrong: list[str] = field(default_factory=list)
    _running: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Traffic:
        self._running = [asyncio.create_task(self._serve(seed)) for seed in range(self.tasks)]
        await self.more(3 * len(self.plans))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def more(self, items: int, seconds: float = 40.0) -> None:
        """Waits until this many further items were served."""
        goal, deadline = self.served + items, asyncio.get_running_loop().time() + seconds
        while self.served < goal:
            assert asyncio.get_running_loop().time() < deadline, f"only {self.served} of {goal}: {self}"
            await asyncio.sleep(0.01)

    async def _serve(self, seed: int) -> None:
        choose = random.Random(seed)
        while True:
            plan = choose.choice(self.plans)
            try:
                await self._serve_one(plan)
            except StoreUnavailable:
                self.unavailable += 1
                await asyncio.sleep(0.02)
            except Exception as error:
                self.wrong.append(repr(error))
                await asyncio.sleep(0.02)

    async def _serve_one(self, plan: ItemPlan) -> None:
        (found,) = await self.writer.look_up([(plan.mm_hash, NAMESPACE)])
        if found is None:
            self.encoded.add(plan.mm_hash)
            await self.writer.save(plan, make_body(plan), ttl=600)
        elif found != plan:
            self.wrong.append(f"another plan: {found}")
        loaded = await self.reader.load(plan, fresh_buffer)
        if isinstance(loaded, Missing):
            self.misses += 1
        elif b"".join(scattered(loaded.body).pieces) != make_body(plan):
            self.wrong.append(f"other bytes of {plan.mm_hash}")
        else:
            self.served += 1
