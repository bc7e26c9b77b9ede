"""Limits per principal: requests and tokens per minute, and concurrent requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter, RateLimiter

from triptych.errors import RateLimited
from triptych.proxy.auth.keys import Principal

#: Seconds for which a request waits for another one of its key to end. A client has a reply's last byte a
#: moment before the call that sent it ends here, and may send its next request at once.
_PATIENCE = 0.25


@dataclass(slots=True)
class Session:
    """One call of a principal. `tokens`: prompt and output tokens that it has used."""

    principal: Principal
    tokens: int = 0

    @property
    def tenant(self) -> str:
        return self.principal.id

    def charge(self, tokens: int) -> None:
        self.tokens += tokens


#: Whose call the running code serves: set where the call is let in, read where its request is admitted. It
#: follows the task of a request and every task and thread that asyncio starts for it.
CURRENT: ContextVar[Session | None] = ContextVar("session", default=None)


class PrincipalLimits:
    """The limits of all principals in this process: with P proxies a principal has P times its limits.

    Requests count in a moving window; tokens, known only at a reply's end, in windows of a minute: a
    request is taken while the window has tokens left, and what it uses counts in full.
    """

    def __init__(self) -> None:
        storage = MemoryStorage()
        self._requests = MovingWindowRateLimiter(storage)
        self._tokens = FixedWindowRateLimiter(storage)
        self._running: Counter[str] = Counter()
        #: Set, and gone from here, when the next request of the principal ends.
        self._ended: dict[str, asyncio.Event] = {}

    def running(self, principal: Principal) -> int:
        """Requests of the principal that have not ended."""
        return self._running[principal.id]

    @asynccontextmanager
    async def admit(self, principal: Principal) -> AsyncIterator[Session]:
        """One request from its first byte to the end of its reply. RateLimited names the limit."""
        await self._take_place(principal)
        session = Session(principal)
        previous = CURRENT.get()
        try:
            await self._check(principal)
            CURRENT.set(session)
            yield session
        finally:
            CURRENT.set(previous)
            self._running[principal.id] -= 1
            if not self._running[principal.id]:
                del self._running[principal.id]
            if (ended := self._ended.pop(principal.id, None)) is not None:
                ended.set()
            await self._charge(principal, session.tokens)

    async def _take_place(self, principal: Principal) -> None:
        most = principal.limits.concurrent_requests
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                while most and self._running[principal.id] >= most:
                    await self._ended.setdefault(principal.id, asyncio.Event()).wait()
        if most and self._running[principal.id] >= most:
            raise RateLimited(
                f"concurrent-requests: {most} requests of this key run already; wait for one to end",
                retry_after=1.0,
            )
        self._running[principal.id] += 1

    async def _check(self, principal: Principal) -> None:
        limits = principal.limits
        if limits.tokens_per_minute:
            item = RateLimitItemPerMinute(limits.tokens_per_minute)
            if not await self._tokens.test(item, "tokens", principal.id):
                raise await _refusal(self._tokens, item, "tokens", principal)
        if limits.requests_per_minute:
            item = RateLimitItemPerMinute(limits.requests_per_minute)
            if not await self._requests.hit(item, "requests", principal.id):
                raise await _refusal(self._requests, item, "requests", principal)

    async def _charge(self, principal: Principal, tokens: int) -> None:
        most = principal.limits.tokens_per_minute
        if most and tokens:
            await self._tokens.hit(RateLimitItemPerMinute(most), "tokens", principal.id, cost=tokens)


async def _refusal(limiter: RateLimiter, item: RateLimitItem, what: str, principal: Principal) -> RateLimited:
    stats = await limiter.get_window_stats(item, what, principal.id)
    wait = min(max(stats.reset_time - time.time(), 1.0), 60.0)
    return RateLimited(
        f"{what}-per-minute: this key may use {item.amount} {what} in a minute; try again in {wait:.0f} s",
        retry_after=wait,
    )
