"""Parsers: the one way in which bytes of clients are parsed, at both doors."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from triptych.proxy.parsing.lifted import parse_lifted
from triptych.proxy.parsing.parse import Parse
from triptych.proxy.parsing.pool import ParserPool
from triptych.proxy.quotas.quota import Quota

#: Bodies up to this are parsed on the event loop, if they have few values.
INLINE_BYTES = 64 << 10
#: Bodies above this are parsed in a process before they are parsed here. A thread alone would hold the
#: interpreter's lock, for seconds where a body is made for it.
THREAD_BYTES = 1 << 20
R = TypeVar("R")


def _at_once(work: Callable[[bytes], R], raw: bytes) -> R:
    """Without passes of the garbage collector over all the values of a body while it is decoded: they hold
    everybody up for longer than the decoder does, and find nothing."""
    if not gc.isenabled():
        return work(raw)
    gc.disable()
    try:
        return work(raw)
    finally:
        gc.enable()


class Parsers:
    """What parses the bodies of one proxy: its thread and its processes, both in turns by key.

    In a thread, what a process has found sound costs the event loop little more than copying its texts.
    """

    def __init__(self, turns: Quota, process_turns: Quota) -> None:
        self._turns = turns
        #: One: parsers hold the interpreter's lock, and a text takes up to five times its bytes meanwhile.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="parse")
        self.pool = ParserPool(process_turns)

    async def run(
        self, holder: str, raw: bytes, parse: Parse[Any], work: Callable[[bytes], R], *, few: bool
    ) -> R:
        """The result of `work(raw)`, which parses by `parse` and whose errors are its own.

        `few`: the caller knows that the bytes hold few values. QuotaExceeded where there is no turn in time.
        """
        if few and len(raw) <= INLINE_BYTES:
            return work(raw)
        if len(raw) > THREAD_BYTES:
            await self.pool.check(holder, raw, parse)
            work = partial(parse_lifted, work)
        with await self._turns.wait(holder, 1):
            return await asyncio.get_running_loop().run_in_executor(self.thread, _at_once, work, raw)

    async def close(self) -> None:
        await self.pool.close()
        self.thread.shutdown(wait=False, cancel_futures=True)
