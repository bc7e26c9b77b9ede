"""A request's media: every source is loaded once, and kept until the request's last user has left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import TypeVar

from triptych.proxy.media.spool import SpooledMedia

T = TypeVar("T")
#: Sources of one request that are loaded at once.
LOADS_AT_ONCE = 8


class MediaHold:
    """Shared by everything that serves one request: its choices see the same bytes of one URL."""

    def __init__(self) -> None:
        self._users = 0
        self._loads: dict[Hashable, asyncio.Task[SpooledMedia]] = {}
        self._room = asyncio.Semaphore(LOADS_AT_ONCE)
        self._cleanups: list[Callable[[], None]] = []

    def join(self) -> None:
        """One more user."""
        self._users += 1

    def leave(self) -> None:
        """One user fewer; with the last one go all media, and loads that are under way."""
        self._users -= 1
        if self._users:
            return
        loads, self._loads = self._loads, {}
        for load in loads.values():
            load.cancel()
            load.add_done_callback(_release)
        cleanups, self._cleanups = self._cleanups, []
        for clean_up in cleanups:
            clean_up()

    def at_end(self, clean_up: Callable[[], None]) -> None:
        """Called when the last user leaves."""
        self._cleanups.append(clean_up)

    async def get(self, source: Hashable, load: Callable[[], Awaitable[SpooledMedia]]) -> SpooledMedia:
        """The source's bytes, by `load` at the first call; the hold keeps them, not the caller."""
        task = self._loads.get(source)
        if task is None:
            task = self._loads[source] = asyncio.create_task(self._bounded(load))
        return await asyncio.shield(task)

    async def _bounded(self, load: Callable[[], Awaitable[SpooledMedia]]) -> SpooledMedia:
        async with self._room:
            return await load()


def _release(load: asyncio.Task[SpooledMedia]) -> None:
    if not load.cancelled() and load.exception() is None:
        load.result().release()


async def gather_or_cancel(works: Sequence[Coroutine[object, None, T]]) -> list[T]:
    """Results in order; the first error cancels the rest."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
