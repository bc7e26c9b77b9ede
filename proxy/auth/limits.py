"""Limits per principal: requests and tokens per minute, and concurrent requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter, RateLimiter

from triptych.base.errors import RateLimited, TriptychError
from triptych.proxy.auth.keys import Principal
from triptych.proxy.quotas.current_call import in_call
from triptych.registry.minute_counts import MinuteCounts

#: Seconds for which a request waits for another one of its key to end. A client has a reply's last byte a
#: moment before the call that sent it ends here, and may send its next request at once.
_PATIENCE = 0.25
#: Seconds that a request waits for the counts of all proxies, and seconds without asking after an error.
_SHARED_SECONDS, _AWAY_SECONDS = 0.25, 5.0


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


class PrincipalLimits:
    """The limits of all principals: of a minute by the counts that all proxies share, of requests at once in
    this process, so that with P proxies a principal may have P times as many.

    Tokens are known only at a reply's end: a request is taken while the minute has tokens left, and what it
    uses counts in full. While the store does not answer, each proxy limits by what it has seen itself.
    """

    def __init__(self, shared: MinuteCounts | None = None) -> None:
        self._shared, self._away_until = shared, 0.0
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
        try:
            await self._check(principal)
            with in_call(session=session, holder=principal.id, models=principal.models):
                yield session
        finally:
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
        if limit := limits.tokens_per_minute:
            item = RateLimitItemPerMinute(limit)
            wait = await self._count("tokens", principal, 0, limit)
            if wait is None and not await self._tokens.test(item, "tokens", principal.id):
                wait = await _local_wait(self._tokens, item, "tokens", principal)
            _refuse(wait, limit, "tokens")
        await self.count_request(principal)

    async def count_request(self, principal: Principal) -> None:
        """One more request of the minute; RateLimited above the key's limit."""
        if limit := principal.limits.requests_per_minute:
            item = RateLimitItemPerMinute(limit)
            wait = await self._count("requests", principal, 1, limit)
            # Seen here, too, for when the store is away.
            if not wait and not await self._requests.hit(item, "requests", principal.id) and wait is None:
                wait = await _local_wait(self._requests, item, "requests", principal)
            _refuse(wait, limit, "requests")

    async def _charge(self, principal: Principal, tokens: int) -> None:
        limit = principal.limits.tokens_per_minute
        if limit and tokens:
            await self._tokens.hit(RateLimitItemPerMinute(limit), "tokens", principal.id, cost=tokens)
            await self._count("tokens", principal, tokens, 0)

    async def _count(self, what: str, principal: Principal, cost: int, limit: int) -> float | None:
        """Seconds to wait by the counts of all proxies, 0.0 for none; None where they are not known."""
        if self._shared is None or time.monotonic() < self._away_until:
            return None
        try:
            async with asyncio.timeout(_SHARED_SECONDS):
                return await self._shared.add(what, principal.id, cost, limit)
        except (TriptychError, TimeoutError):
            self._away_until = time.monotonic() + _AWAY_SECONDS
            return None


async def _local_wait(limiter: RateLimiter, item: RateLimitItem, what: str, principal: Principal) -> float:
    stats = await limiter.get_window_stats(item, what, principal.id)
    return stats.reset_time - time.time()


def _refuse(wait: float | None, limit: int, what: str) -> None:
    """RateLimited where there is something to wait for."""
    if wait:
        wait = min(max(wait, 1.0), 60.0)
        raise RateLimited(
            f"{what}-per-minute: this key may use {limit} {what} in a minute; try again in {wait:.0f} s",
            retry_after=wait,
        )
