"""Waits of an event loop, each with a deadline and a word for what is waited for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from support.processes.cluster import PATIENCE

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


async def until(holds: Callable[[], Any], what: str = "the condition", seconds: float = 45.0) -> None:
    """Returns once `holds()` is true; AssertionError naming `what` after `seconds`, before a test's limit."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, f"waited {seconds:.0f} s for: {what}"
        await asyncio.sleep(0.01)


async def stop_accepting(listeners: Sequence[socket.socket]) -> None:
    """Returns once every connection that was accepted has begun: asyncio forgets those of a closed server."""
    for listener in listeners:
        asyncio.get_running_loop().remove_reader(listener)
    for _ in range(3):  # a turn each for the accepted socket, its transport, and its protocol
        await asyncio.sleep(0)
