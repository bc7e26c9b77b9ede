"""Encoder jobs: one item each on its way into the store, and what it waits for."""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from triptych.base.tracing.context import SpanContext
from triptych.base.types import ItemPlan
from triptych.proxy.encoders.fair_turns import Turn
from triptych.proxy.media.source import ItemMedia
from triptych.proxy.routing import MAX_LOSSES

#: Seconds that a job keeps away from an encoder that failed it, doubled with every failure up to the limit.
FIRST_BACKOFF = 0.1
LAST_BACKOFF = 2.0
#: More of them than the limit takes. A popular item is tried without end, and a float holds 1023 doublings.
_MAX_DOUBLINGS = 16

Rank = tuple[bool, bool, int, int]


@dataclass(frozen=True, slots=True)
class PlanKey:
    """What queued jobs need alike to be planned. A suspect is `alone`: every other job may precede it.

    `tenant` is whose share of plan credit they need; empty for those that need none.
    """

    namespace: str
    owner: str
    avoid: frozenset[str]
    alone: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class RunKey:
    """What planned and admitted jobs need alike to run."""

    address: str
    alone: str


class JobState(enum.Enum):
    """Where a job stands; see `EncoderJobTable`."""

    QUEUED = enum.auto()
    PLANNING = enum.auto()
    PLANNED = enum.auto()
    RUNNING = enum.auto()


#: States in which an encoder works on the item: one that waits there with its plan is not why it ended.
AT_WORK = (JobState.PLANNING, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class ItemSource:
    """All that an encoder needs of an item.

    `deadline` and `looked_up` (when the store's look-up began) are moments of the proxy's clock.
    """

    mm_hash: str
    namespace: str
    modality: str
    media: ItemMedia
    processor_options: str
    salt: str
    request_id: str
    #: The client's own name of the request: for logs.
    label: str
    deadline: float
    looked_up: float
    #: The principal's id where keys are in use.
    tenant: str = ""
    #: The request's.
    priority: int = 0
    model: str = ""
    #: The request's span of the item, where the proxy has traces.
    trace: SpanContext | None = None


@dataclass(frozen=True, slots=True)
class EncoderSlot:
    """An encoder that may get jobs; credits are this proxy's part, `kind` is the worker's."""

    address: str
    namespaces: tuple[str, ...]
    plan_credit: int
    tower_credit: int
    kind: str = ""

    def share(self, others: int) -> int:
        """Plan credit that one tenant may have, beside `others`: a quarter of what these leave stays free."""
        left = self.plan_credit - others
        return max(1, left - max(1, left // 4))


class AdmittedWaiters:
    """The admitted requests among a job's waiters, and the order of the one that was admitted first."""

    __slots__ = ("_heap", "_orders")

    def __init__(self) -> None:
        self._orders: dict[str, int] = {}
        #: (order, request); what is no longer in `_orders` is dropped when it comes to the top.
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._orders)

    def __iter__(self) -> Iterator[str]:
        return iter(self._orders)

    def add(self, request_id: str, order: int) -> None:
        if self._orders.get(request_id) != order:
            self._orders[request_id] = order
            heapq.heappush(self._heap, (order, request_id))

    def discard(self, request_id: str) -> bool:
        """Whether the request was among them."""
        return self._orders.pop(request_id, None) is not None

    @property
    def first(self) -> int | None:
        heap = self._heap
        while heap and self._orders.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None


@dataclass(eq=False, slots=True)
class EncoderJob:
    """One item's job. `try_id` is new for every try; reports of old tries are ignored."""

    mm_hash: str
    namespace: str
    order: int
    #: Its turn among those that arrive, by tenant.
    turn: Turn = field(default_factory=Turn)
    #: Whose encoders it is for.
    model: str = ""
    #: What its encoder needs of the item; of the waiter that waits longest.
    source: ItemSource | None = None
    re_encode: bool = False
    #: It may run before a PD worker has reserved memory for it.
    early: bool = False
    damaged_digest: str = ""
    state: JobState = JobState.QUEUED
    address: str = ""
    #: The kind of the encoder at `address`.
    kind: str = ""
    tries: int = 0
    #: Times that it was queued again, without a failure, for an encoder with less work.
    moves: int = 0
    #: Encoders that ended while they worked on the item, as far as they count.
    losses: int = 0
    plan: ItemPlan | None = None
    #: Requests that wait for the item.
    waiters: dict[str, None] = field(default_factory=dict)
    admitted: AdmittedWaiters = field(default_factory=AdmittedWaiters)
    #: An encoder that holds the item's lease: the next try joins it there.
    owner_address: str = ""
    owner_token: str = ""
    #: Token of a lease whose owner failed the item: the next try replaces that lease.
    failed_lease_token: str = ""
    not_before: float = 0.0
    avoid: dict[str, float] = field(default_factory=dict)
    #: When it arrived; None once its size is known, and for a re-encode, which is no arrival.
    arrived: float | None = None

    @property
    def try_id(self) -> str:
        return f"{self.mm_hash[:12]}-{self.order}.{self.tries + self.moves}"

    @property
    def suspect(self) -> bool:
        """Whether one encoder more may be lost to the item, and none after that."""
        return self.losses >= MAX_LOSSES - 1

    @property
    def rank(self) -> Rank:
        """Re-encodes first; then by turn of admission; what is not admitted last, by turn of arrival."""
        first = self.admitted.first
        return (not self.re_encode, first is None, self.turn.number if first is None else first, self.order)

    @property
    def plan_key(self) -> PlanKey:
        alone = self.mm_hash if self.suspect else ""
        tenant = "" if self.re_encode else self.turn.tenant
        return PlanKey(self.namespace, self.owner_address, frozenset(self.avoid), alone, tenant)

    @property
    def run_key(self) -> RunKey:
        return RunKey(self.address, self.mm_hash if self.suspect else "")

    def move(self) -> None:
        """Leaves its encoder, which has not failed it."""
        self.state = JobState.QUEUED
        self.moves += 1

    def requeue(
        self, now: float, owner_address: str, owner_token: str, *, joins: bool, elsewhere: bool
    ) -> None:
        """A try has failed: the next one `joins` the owner of the item's lease, or replaces a failed lease.

        It waits, unless it joins or an encoder that has not failed the job is there `elsewhere`.
        """
        backoff = min(FIRST_BACKOFF * 2.0 ** min(self.tries, _MAX_DOUBLINGS), LAST_BACKOFF)
        if not joins and not owner_address:
            self.avoid[self.address] = now + LAST_BACKOFF
        at_once = joins or (not owner_address and elsewhere)
        self.not_before = now if at_once else now + backoff
        if not joins:
            self.failed_lease_token = owner_token or self.owner_token or self.failed_lease_token
        self.owner_address, self.owner_token = (owner_address, owner_token) if joins else ("", "")
        self.state = JobState.QUEUED
        self.tries += 1


@dataclass(slots=True)
class Requester:
    """A request that waits for items."""

    tenant: str = ""
    deadline: float = math.inf
    priority: int = 0
    #: The jobs that it waits for.
    jobs: dict[EncoderJob, None] = field(default_factory=dict)
    #: Its turn among the admitted requests, while a PD worker has memory for its items.
    admission: Turn | None = None
