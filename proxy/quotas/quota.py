"""Quota: a capacity that many principals share, with a bound for each and deadlines for holding it.

Every budget of the proxy is one: bytes of bodies and replies, connections, places, fetches, look-ups.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TypeVar

from triptych.base.errors import Overloaded

RETRY_AFTER = 2.0


@dataclass(frozen=True, slots=True)
class QuotaSpec:
    """The fixed facts of one quota; docs/limits.md shows them as a row.

    `capacity` counts `unit`s. A holder is an API key, or a client's address before login. Seconds
    of 0 mean that there is no such deadline.
    """

    name: str
    capacity: int
    unit: str
    #: What is counted, as an error names it: "memory for request bodies".
    what: str
    #: The flag that sets the capacity; empty where it is fixed.
    flag: str
    #: What a client meets above the capacity or above its own bound.
    above: str
    per: Literal["key", "peer"] = "key"
    #: The share of the capacity that one holder may have, and the largest claim: it is never above the bound
    #: of a holder that has nothing yet.
    share: float = 0.5
    largest: int = 1
    #: Seconds until a claim that has to wait is refused.
    wait_seconds: float = 0.0
    #: Seconds that a hold may last without progress, and in total.
    idle_seconds: float = 0.0
    total_seconds: float = 0.0


class QuotaExceeded(Overloaded):
    """The capacity, or the holder's share of it, is in use."""


class Hold:
    """An amount that one holder has of a quota, until `close`. Closing twice is harmless."""

    __slots__ = (
        "_on_expire",
        "_quota",
        "amount",
        "closed",
        "expired",
        "holder",
        "progressed",
        "settled",
        "since",
    )

    def __init__(self, quota: Quota, holder: str, amount: int, on_expire: Callable[[], None] | None) -> None:
        self._quota = quota
        self._on_expire = on_expire
        self.holder = holder
        self.amount = amount
        self.since = self.progressed = quota.clock()
        self.closed = False
        #: A deadline of the hold has passed; its owner was told and closes it.
        self.expired = False
        #: The deadlines of the quota do not apply any more.
        self.settled = False

    def add(self, amount: int) -> None:
        """Holds more. QuotaExceeded where it does not fit; the hold is unchanged then."""
        self._quota._check(self.holder, amount, own=self.amount)
        self._quota._count(self.holder, amount)
        self.amount += amount

    def remove(self, amount: int) -> None:
        """Gives a part back."""
        amount = 0 if self.closed else min(amount, self.amount)
        self.amount -= amount
        self._quota._count(self.holder, -amount)

    def progress(self) -> None:
        """Restarts the deadline for holding without progress: the client has sent or taken enough bytes."""
        self.progressed = self._quota.clock()

    def close(self) -> None:
        """Gives everything back."""
        self.remove(self.amount)
        self.closed = True
        self._quota._holds.pop(self, None)

    def expire(self) -> None:
        """Tells the owner once that a deadline has passed."""
        if self.expired or self.closed:
            return
        self.expired = True
        if self._on_expire is not None:
            self._on_expire()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Quota:
    """One capacity and who holds how much of it.

    A holder may have its share of the capacity, and never more than what then stays free for others: holders
    that come later always find something. The holder "" is everybody where no keys are in use; it may have
    all of it, and so may the one key of a proxy that has no other (`shared` says no). Claims that wait are
    served in turn, a holder after the other.
    """

    def __init__(
        self,
        spec: QuotaSpec,
        clock: Callable[[], float] = time.monotonic,
        shared: Callable[[], bool] = lambda: True,
    ) -> None:
        self.spec = spec
        self.clock = clock
        self._shared = shared
        self.used = 0
        self._held: dict[str, int] = {}
        self._holds: dict[Hold, None] = {}
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    def held(self, holder: str) -> int:
        return self._held.get(holder, 0)

    @property
    def free(self) -> int:
        return self.spec.capacity - self.used

    def bound(self, holder: str, own: int = 0) -> int:
        """The amount that the holder may have while the others hold what they do.

        `own` is what the hold that grows has already: as the only one of its holder, it may become the
        largest.
        """
        # Who comes without a key is "@" and an address, and shares what the keys have.
        alone = self.spec.per == "key" and not holder.startswith("@") and not self._shared()
        if not holder or alone:
            return self.spec.capacity
        for_others = self.used - self.held(holder)
        shared = (self.spec.capacity - for_others + 1) // 2
        bound = min(int(self.spec.capacity * self.spec.share), shared)
        return bound if self.held(holder) > own else max(bound, self.spec.largest)

    def fits(self, holder: str, amount: int, own: int = 0) -> bool:
        return amount <= self.free and self.held(holder) + amount <= self.bound(holder, own)

    def hold(self, holder: str, amount: int = 0, on_expire: Callable[[], None] | None = None) -> Hold:
        """Holds `amount` now. QuotaExceeded where it does not fit.

        `on_expire` is called by `sweep` when a deadline of the hold passes; it has to end what holds.
        """
        self._check(holder, amount)
        return self._make(holder, amount, on_expire)

    async def wait(self, holder: str, amount: int, on_expire: Callable[[], None] | None = None) -> Hold:
        """Holds `amount` once it fits; QuotaExceeded where that takes longer than `wait_seconds`."""
        if not self._waiting and self.fits(holder, amount):
            return self._make(holder, amount, on_expire)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        claim = (amount, turn)
        self._waiting.setdefault(holder, deque()).append(claim)
        self._give_turns()
        try:
            async with asyncio.timeout(self.spec.wait_seconds):
                await turn
        except BaseException as error:
            self._withdraw(holder, claim)
            if isinstance(error, TimeoutError):
                self._refuse(holder, amount)
            raise
        # The amount was counted when the turn was given.
        return self._make(holder, 0, on_expire, given=amount)

    def sweep(self) -> None:
        """Expires the holds whose deadlines have passed."""
        idle, total = self.spec.idle_seconds, self.spec.total_seconds
        if not idle and not total:
            return
        now = self.clock()
        for hold in list(self._holds):
            if hold.settled:
                continue
            if (idle and now - hold.progressed >= idle) or (total and now - hold.since >= total):
                hold.expire()

    def _make(self, holder: str, amount: int, on_expire: Callable[[], None] | None, given: int = 0) -> Hold:
        hold = Hold(self, holder, amount + given, on_expire)
        self._holds[hold] = None
        self._count(holder, amount)
        return hold

    def _check(self, holder: str, amount: int, own: int = 0) -> None:
        if not self.fits(holder, amount, own):
            self._refuse(holder, amount)

    def _refuse(self, holder: str, amount: int) -> None:
        spec = self.spec
        flag = f" ({spec.flag})" if spec.flag else ""
        if amount <= self.free:
            raise QuotaExceeded(
                f"this {'key' if spec.per == 'key' else 'client'} holds its share of the {spec.what}{flag}",
                retry_after=RETRY_AFTER,
            )
        raise QuotaExceeded(f"the {spec.what} is in use{flag}; try again later", retry_after=RETRY_AFTER)

    def _count(self, holder: str, amount: int) -> None:
        self.used += amount
        held = self._held.get(holder, 0) + amount
        if held:
            self._held[holder] = held
        else:
            self._held.pop(holder, None)
        if amount < 0 and self._waiting:
            self._give_turns()

    def _give_turns(self) -> None:
        """Serves the first claim of each holder in turn, until one does not fit into what is free.

        A claim above its holder's bound lets the other holders pass; one that only waits for capacity does
        not, since small claims would overtake a large one for ever.
        """
        for holder in list(self._waiting):
            amount, turn = self._waiting[holder][0]
            if turn.done():
                continue  # the caller gives up in this moment, and withdraws it
            if self.held(holder) + amount > self.bound(holder):
                continue
            if amount > self.free:
                return
            self._withdraw(holder, (amount, turn), given=True)
            self._count(holder, amount)
            turn.set_result(None)

    def _withdraw(self, holder: str, claim: tuple[int, asyncio.Future[None]], given: bool = False) -> None:
        """Takes a claim from the queue; its holder goes to the end of the turns."""
        amount, turn = claim
        if not given and turn.done() and not turn.cancelled():
            # The turn came in the moment in which the caller gave up.
            self._count(holder, -amount)
            return
        claims = self._waiting.pop(holder, deque())
        if claim in claims:
            claims.remove(claim)
        if claims:
            self._waiting[holder] = claims
        if not given:
            self._give_turns()


T = TypeVar("T")


class QuotaThreads:
    """As many threads as the quota has places. A place is taken until the work ends, awaited or not."""

    def __init__(self, quota: Quota, name: str) -> None:
        self._quota = quota
        self._executor = ThreadPoolExecutor(quota.spec.capacity, thread_name_prefix=name)

    async def run(self, holder: str, work: Callable[[], T], ended: Callable[[], None] = lambda: None) -> T:
        """The result of `work`; `ended` is called when it will not run any more. QuotaExceeded: no turn."""
        loop = asyncio.get_running_loop()
        try:
            hold = await self._quota.wait(holder, 1)
        except BaseException:
            ended()
            raise

        def end(future: Future[T] | None = None) -> None:
            ended()
            with contextlib.suppress(RuntimeError):  # the end of the event loop
                loop.call_soon_threadsafe(hold.close)

        try:
            future = self._executor.submit(work)
        except BaseException:
            end()
            raise
        future.add_done_callback(end)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
