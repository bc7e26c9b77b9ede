"""Waits of an event loop, each with a deadline and a word for what is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from support.cluster import PATIENCE

T = TypeVar("T")


async def within(what: str, work: Awaitable[T], seconds: float = PATIENCE) -> T:
    """The result of `work`; AssertionError naming `what` when it takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await work
    except TimeoutError:
        if deadline.expired():
            raise AssertionError(f"waited {seconds:.0f} s for: {what}") from None
        raise
