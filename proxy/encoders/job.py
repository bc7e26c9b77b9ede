"""Encoder jobs: one item each on its way into the store, their order and turns fair between tenants."""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from triptych.base.tracing.context import SpanContext
from triptych.base.types import ItemPlan
from triptych.proxy.media.source import ItemMedia
from triptych.proxy.routing import MAX_LOSSES

#: Seconds that a job keeps away from an encoder that failed it, doubled with every failure up to the limit.
FIRST_BACKOFF = 0.1
LAST_BACKOFF = 2.0
#: More of them than the limit takes. A popular item is tried without end, and a float holds 1023 doublings.
_MAX_DOUBLINGS = 16
#: Seconds of slack that later work has to have less to go before earlier work: estimates are no better.
SLACK_MARGIN = 1.0
#: Later work of its tenant that may go before any one piece of work.
MAX_OVERTAKEN = 64

Rank = tuple[bool, bool, int, int]


@dataclass(eq=False, slots=True)
class Turn:
    """One turn of a tenant. Its holder, an item or a request, has `work` seconds left at its encoders."""

    tenant: str = ""
    holder: str = ""
    number: int = 0
    deadline: float = math.inf
    work: float = 0.0
    #: Later work that has gone before it.
    overtaken: int = 0
    #: It is drawn, and its work has not begun.
    waits: bool = False

    def passes(self, other: Turn) -> bool:
        """Whether it has less slack, and not by its work alone: with one timeout for all nothing changes."""
        slack, others = self.deadline - self.work, other.deadline - other.work
        urgent = self.deadline < other.deadline and slack + SLACK_MARGIN < others
        return urgent and other.overtaken < MAX_OVERTAKEN


class FairTurns:
    """Fair queueing by tenant: new work comes after one turn of each other tenant, whatever they have queued.

    A tenant's turns are the same whatever its deadlines: urgent work takes the turn of its own tenant's other
    work, which moves one turn back, MAX_OVERTAKEN times at most. Without deadlines work keeps its order.
    """

    def __init__(self) -> None:
        #: The last turn that each tenant has drawn, where it is not over.
        self._drawn: dict[str, int] = {}
        self._now = 0
        #: Turns whose work has not begun, by tenant, in order.
        self._waiting: dict[str, list[Turn]] = {}

    def draw(self, tenant: str, holder: str = "") -> Turn:
        """The tenant's next turn; `hurry` moves it forward."""
        number = max(self._drawn.get(tenant, 0), self._now) + 1
        self._drawn[tenant] = number
        turn = Turn(tenant, holder, number, waits=True)
        self._waiting.setdefault(tenant, []).append(turn)
        return turn

    def hurry(self, turn: Turn, deadline: float, work: float = 0.0) -> list[Turn]:
        """The holder has to end by `deadline`. Returns the other turns that have moved by it."""
        moved: list[Turn] = []
        if deadline >= turn.deadline:
            return moved
        turn.deadline, turn.work = deadline, work
        waiting = self._waiting[turn.tenant] if turn.waits else []
        place = next((place for place in reversed(range(len(waiting))) if waiting[place] is turn), 0)
        while place > 0 and turn.passes(before := waiting[place - 1]):
            turn.number, before.number = before.number, turn.number
            before.overtaken += 1
            waiting[place - 1 : place + 1] = turn, before
            moved.append(before)
            place -= 1
        return moved

    def begin(self, number: int, *turns: Turn | None) -> None:
        """Work of this number begins, which these turns wait for."""
        for turn in turns:
            self.drop(turn)
        if number > self._now:
            self._now = number
            if len(self._drawn) > 64:
                self._drawn = {tenant: drawn for tenant, drawn in self._drawn.items() if drawn > number}

    def drop(self, turn: Turn | None) -> None:
        """The turn's work has begun or is over: the turn moves no more. Idempotent."""
        if turn is not None and turn.waits:
            turn.waits = False
            waiting = self._waiting[turn.tenant]
            waiting.remove(turn)
            if not waiting:
                del self._waiting[turn.tenant]


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
    #: The jobs that it waits for.
    jobs: dict[EncoderJob, None] = field(default_factory=dict)
    #: Its turn among the admitted requests, while a PD worker has memory for its items.
    admission: Turn | None = None


K = TypeVar("K", bound=Hashable)

#: Entries that are out of date may make up this many, and as many as the others, before they are swept out.
_STALE_ENTRIES = 64


class JobQueue:
    """Jobs by rank, the best first. A job that is pushed again moves to its new rank."""

    __slots__ = ("_heap", "_tickets", "_turn")

    def __init__(self) -> None:
        #: (rank, ticket, job): out of date unless the ticket is the job's latest.
        self._heap: list[tuple[Rank, int, EncoderJob]] = []
        self._tickets: dict[EncoderJob, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def push(self, job: EncoderJob, rank: Rank) -> None:
        self._turn += 1
        self._tickets[job] = self._turn
        heapq.heappush(self._heap, (rank, self._turn, job))
        if len(self._heap) > _STALE_ENTRIES + 2 * len(self._tickets):
            self._heap = [entry for entry in self._heap if self._tickets.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, job: EncoderJob) -> None:
        self._tickets.pop(job, None)

    def first(self) -> tuple[Rank, EncoderJob] | None:
        """The best job with its rank; it stays."""
        heap = self._heap
        while heap and self._tickets.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        return (heap[0][0], heap[0][2]) if heap else None

    def jobs(self) -> list[EncoderJob]:
        return list(self._tickets)


class JobFiles(Generic[K]):
    """Queues of jobs by a key that says what they wait for; a job is in one of them at most."""

    def __init__(self) -> None:
        self._queues: dict[K, JobQueue] = {}
        self._keys: dict[EncoderJob, K] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def file(self, job: EncoderJob, key: K, rank: Rank) -> None:
        """Puts the job under `key`, at this rank."""
        if self._keys.get(job, key) != key:
            self.discard(job)
        self._keys[job] = key
        self._queues.setdefault(key, JobQueue()).push(job, rank)

    def renew(self, job: EncoderJob, rank: Rank) -> None:
        """Moves the job to this rank; nothing where it is not filed."""
        if job in self._keys:
            self._queues[self._keys[job]].push(job, rank)

    def discard(self, job: EncoderJob) -> None:
        """Idempotent."""
        if job in self._keys:
            key = self._keys.pop(job)
            queue = self._queues[key]
            queue.discard(job)
            if not queue:
                del self._queues[key]

    def all_keys(self) -> list[K]:
        """Those that some job is filed under."""
        return list(self._queues)

    def jobs(self, key: K) -> list[EncoderJob]:
        queue = self._queues.get(key)
        return [] if queue is None else queue.jobs()

    def walk(self, keys: Iterable[K]) -> Walk:
        """The jobs under `keys`, best first."""
        return Walk(self._queues[key] for key in keys)


class Walk:
    """Several queues as one. What keeps the first job of a queue back keeps all behind it back.

    Between two questions jobs may leave the queues, but none may enter.
    """

    def __init__(self, queues: Iterable[JobQueue]) -> None:
        self._heads: list[tuple[Rank, int, JobQueue]] = []
        for index, queue in enumerate(queues):
            if (first := queue.first()) is not None:
                self._heads.append((first[0], index, queue))
        heapq.heapify(self._heads)

    def first(self) -> EncoderJob | None:
        """The best job of all."""
        while self._heads:
            rank, index, queue = self._heads[0]
            head = queue.first()
            if head is None:
                heapq.heappop(self._heads)
            elif head[0] != rank:
                heapq.heapreplace(self._heads, (head[0], index, queue))
            else:
                return head[1]
        return None

    def skip(self) -> None:
        """Leaves the queue of the best job out from now on."""
        heapq.heappop(self._heads)
