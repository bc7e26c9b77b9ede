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

from triptych.base.errors import RateLimited
from triptych.proxy.auth.keys import Principal
from triptych.proxy.quotas.quota import HOLDER

#: Seconds for which a request waits for another one of its key to end. A client has a reply's last byte a
#: moment before the call that sent it ends here, and may send its next request at once.
_PATIENCE = 0.25


@dataclass(slots=True)
class Session:
    """One call of a principal. `tokens`: prompt and output tokens that it has used."""

    principal: Principal
    limits: PrincipalLimits
    tokens: int = 0
    #: As how many requests of its key it counts, until it ends.
    counted: int = 1
    _running: int = 0

    @property
    def tenant(self) -> str:
        return self.principal.id

    def charge(self, tokens: int) -> None:
        self.tokens += tokens

    async def begin(self, answers: int) -> None:
        """Counts these answers as requests of the key, the first one being the call itself.

        RateLimited where the key may not have them.
        """
        self._running += answers
        if (more := self._running - self.counted) > 0:
            self.counted += more
            try:
                await self.limits.take_places(self.principal, more)
            except BaseException:
                self.counted -= more
                self._running -= answers
                raise

    def end(self, answers: int) -> None:
        """They have ended; the next ones of the call take their places."""
        self._running -= answers


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
        """Requests of the principal that have not ended; one for `n` answers counts n times."""
        return self._running[principal.id]

    @asynccontextmanager
    async def admit(self, principal: Principal) -> AsyncIterator[Session]:
        """One request from its first byte to the end of its reply. RateLimited names the limit."""
        await self.take_places(principal, 1)
        session = Session(principal, self)
        previous, holder = CURRENT.get(), HOLDER.get()
        try:
            await self._check(principal)
            CURRENT.set(session)
            HOLDER.set(principal.id)
            yield session
        finally:
            CURRENT.set(previous)
            HOLDER.set(holder)
            self._running[principal.id] -= session.counted
            if not self._running[principal.id]:
                del self._running[principal.id]
            if (ended := self._ended.pop(principal.id, None)) is not None:
                ended.set()
            await self._charge(principal, session.tokens)

    async def take_places(self, principal: Principal, count: int) -> None:
        """Counts `count` more requests of the principal, for which it waits a moment."""
        maximum = principal.limits.concurrent_requests
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                while maximum and self._running[principal.id] + count > maximum:
                    await self._ended.setdefault(principal.id, asyncio.Event()).wait()
        if maximum and self._running[principal.id] + count > maximum:
            raise RateLimited(
                f"concurrent-requests: this key may have {maximum} requests at once, and each answer of n is "
                "one; wait for one to end",
                retry_after=1.0,
            )
        self._running[principal.id] += count

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
        limit = principal.limits.tokens_per_minute
        if limit and tokens:
            await self._tokens.hit(RateLimitItemPerMinute(limit), "tokens", principal.id, cost=tokens)


async def _refusal(limiter: RateLimiter, item: RateLimitItem, what: str, principal: Principal) -> RateLimited:
    stats = await limiter.get_window_stats(item, what, principal.id)
    wait = min(max(stats.reset_time - time.time(), 1.0), 60.0)
    return RateLimited(
        f"{what}-per-minute: this key may use {item.amount} {what} in a minute; try again in {wait:.0f} s",
        retry_after=wait,
    )
