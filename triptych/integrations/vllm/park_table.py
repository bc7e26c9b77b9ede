"""The park table: which requests wait for embeddings, what is loaded for them, and when waiting ends.

A decision core without I/O, clock or vLLM. The scheduler asks `ensure` for a request before every step that
could schedule it, then at once `has_copy` for its items. So that both give one answer, the results of loads
are taken over in `ensure` alone, never between the two.

An item's life, while requests need it:

    (unknown) --load--> loading --copied--> READY, until memory is needed and no request or step uses it
                  ^        \\--absent, store down, no room--> missed: encoded by vLLM where the request has
                  |                                           the media, else loaded again after a pause,
                  \\__________________________________________ until the request's deadline
"""

from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Protocol

from triptych.base.hashing import MM_HASH
from triptych.base.log import short
from triptych.base.types import ItemPlan
from triptych.integrations.vllm.host_copies import HostCopy

#: Rows and patch grid of an item.
ItemSize = tuple[int, tuple[int, ...]]


class EngineCache:
    """The items in the cache, with the sizes that they were computed for.

    An item that no request has taken yet goes when another one needs its place, which vLLM tells at the end
    of the step: after a request that may take places, `holds` says no until then.
    """

    def __init__(self) -> None:
        self._held: dict[str, ItemSize] = {}
        self._allocated: dict[str, ItemSize] = {}
        self._may_evict = False

    def holds(self, identifier: str, size: ItemSize) -> bool:
        """Whether vLLM surely has the item, if the request asked about takes no place before it."""
        return not self._may_evict and self._held.get(identifier) == size

    def may_evict(self) -> None:
        """A request is scheduled that needs places."""
        self._may_evict = True

    def allocated(self, identifier: str, size: ItemSize) -> None:
        """The item has its place from this step on."""
        self._allocated[identifier] = size

    def end_step(self, freed: Iterable[str]) -> None:
        """The step's end; `freed` have lost their places in it, and not got them again."""
        self._held |= self._allocated
        for identifier in freed:
            self._held.pop(identifier, None)
        self._allocated, self._may_evict = {}, False


logger = logging.getLogger(__name__)

#: Seconds until a missed item is loaded again: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25


class LoadOutcome(enum.Enum):
    COPIED = enum.auto()
    #: There is no usable value in the store, or the store does not answer.
    ABSENT = enum.auto()
    #: The host copies leave no room for it.
    NO_SPACE = enum.auto()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The end of one load. `missing_bytes` are those by which a NO_ROOM fell short, `nbytes` its item's."""

    identifier: str
    outcome: LoadOutcome
    copy: HostCopy | None = None
    reason: str = ""
    missing_bytes: int = 0
    nbytes: int = 0


class CopyLoads(Protocol):
    """Loads into host copies, which run beside the scheduler."""

    def start(self, identifier: str) -> None:
        """Starts a load; never blocks. Every start is followed by one report."""

    def reports(self) -> Sequence[LoadReport]:
        """Drains the reports."""

    def drop(self, copy: HostCopy) -> None:
        """Frees a copy."""


@dataclass(frozen=True, slots=True)
class NeededItem:
    """An item of which the engine has not consumed the last row.

    `rows` are what its placeholder takes, `grid` its patch grid where known. `has_media`: the engine can
    encode it itself.
    """

    identifier: str
    rows: int
    has_media: bool
    grid: tuple[int, ...] = ()

    @property
    def size(self) -> ItemSize:
        return self.rows, self.grid

    def misfit(self, plan: ItemPlan) -> str:
        """Why the stored embedding cannot fill the placeholder; empty where it can."""
        if plan.rows != self.rows:
            return f"it is stored with {plan.rows} rows, its placeholder takes {self.rows}"
        if self.grid and plan.grid_thw and self.grid != plan.grid_thw:
            return f"it is stored with the grid {plan.grid_thw}, the request says {self.grid}"
        return ""


@dataclass(frozen=True, slots=True)
class ParkLimits:
    """Seconds that a request waits without and with media; steps after which a used copy may be freed; bytes
    of all copies.
    """

    wait: float
    media_wait: float
    settle_steps: int
    host_memory: int


class _Verdict(enum.Enum):
    READY = enum.auto()
    WAIT = enum.auto()
    #: The engine encodes the item.
    ENCODE = enum.auto()
    FAIL = enum.auto()


@dataclass(slots=True)
class _Copy:
    """A copy, and the first step in which it may be freed."""

    copy: HostCopy
    settled_at: int = 0


@dataclass(slots=True)
class _Miss:
    reason: str
    retry_at: float
    pause: float
    nbytes: int


@dataclass(slots=True)
class _Parked:
    """A live request: the items that it holds, and since when it waits."""

    held: set[str] = field(default_factory=set)
    encoded: set[str] = field(default_factory=set)
    since: float | None = None
    failed: bool = False


class ParkTable:
    """The table of one scheduler. For the scheduler's thread."""

    def __init__(self, loads: CopyLoads, limits: ParkLimits, clock: Callable[[], float]) -> None:
        self._loads = loads
        self._limits = limits
        self._clock = clock
        self.engine_cache = EngineCache()
        #: Copies, the longest unused first.
        self._copies: OrderedDict[str, _Copy] = OrderedDict()
        self._loading: set[str] = set()
        self._misses: dict[str, _Miss] = {}
        #: Live requests, the oldest first, and the ids of those that hold each item.
        self._requests: dict[str, _Parked] = {}
        self._holders: dict[str, set[str]] = {}
        self._unavailable: set[str] = set()
        self._used: dict[str, HostCopy] = {}
        self._step = 0

    def ensure(self, request_id: str, needed: Sequence[NeededItem]) -> bool:
        """Whether the engine may schedule the request now. False parks it; never blocks."""
        now = self._clock()
        self._take_reports(now)
        request = self._requests.setdefault(request_id, _Parked())
        if request.failed:
            return False
        ambiguous = _ambiguous(needed)
        # What vLLM holds needs no copy. A place for an item may cost those behind it theirs.
        needed = list(dropwhile(lambda item: self.engine_cache.holds(item.identifier, item.size), needed))
        self._hold(request_id, request, {item.identifier for item in needed})
        if request.since is None:
            request.since = now
        if ambiguous:
            self._log_unavailable(
                request_id, ambiguous, "the request gives one identifier to different items"
            )
            verdicts = [_Verdict.FAIL]
        else:
            verdicts = [self._judge(request_id, request, item, now) for item in needed]
        if _Verdict.FAIL in verdicts:
            request.failed = True
            self._unavailable.add(request_id)
            self._hold(request_id, request, set())
            return False
        if _Verdict.WAIT in verdicts:
            return False
        request.since = None
        if needed:
            self.engine_cache.may_evict()
        return True

    def has_copy(self, identifier: str) -> bool:
        """Whether there is a host copy, which stays until the request asked about last has been scheduled."""
        return identifier in self._copies

    def use(self, identifier: str) -> None:
        """The item is scheduled: this step's workers take its host copy, where there is one."""
        entry = self._copies.get(identifier)
        if entry is not None:
            entry.settled_at = self._step + self._limits.settle_steps
            self._used[identifier] = entry.copy

    def end_step(self, freed: Iterable[str] = ()) -> list[HostCopy]:
        """Ends the step that is being scheduled: the copies that its workers take.

        `freed` are the items that have left vLLM's encoder cache.
        """
        self.engine_cache.end_step(freed)
        self._step += 1
        used, self._used = list(self._used.values()), {}
        return used

    def take_unavailable(self) -> set[str]:
        """Requests whose embeddings cannot be had; each is named once."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    def finished(self, request_id: str) -> None:
        """The request has ended, in whatever way. Idempotent."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._hold(request_id, request, set())
        self._unavailable.discard(request_id)

    def _judge(self, request_id: str, request: _Parked, item: NeededItem, now: float) -> _Verdict:
        identifier = item.identifier
        entry = self._copies.get(identifier)
        if entry is not None:
            misfit = item.misfit(entry.copy.plan)
            return self._misfit(request_id, request, item, misfit) if misfit else _Verdict.READY
        if identifier in request.encoded:
            return _Verdict.ENCODE
        if not MM_HASH.fullmatch(identifier):
            return self._without(request_id, request, item, "its identifier is no mm_hash of 64 hex digits")
        miss = self._misses.get(identifier)
        reason = miss.reason if miss is not None else "the store has not answered"
        if item.has_media and miss is not None:
            return self._without(request_id, request, item, reason)
        if miss is not None and self._nbytes(request) + miss.nbytes > self._limits.host_memory:
            return self._without(
                request_id, request, item, f"the request's items together need more: {reason}"
            )
        limit = self._limits.media_wait if item.has_media else self._limits.wait
        assert request.since is not None
        if now - request.since >= limit:
            return self._without(request_id, request, item, f"not there after {limit:g} s: {reason}")
        if identifier not in self._loading and (miss is None or now >= miss.retry_at):
            self._loading.add(identifier)
            self._loads.start(identifier)
        return _Verdict.WAIT

    def _nbytes(self, request: _Parked) -> int:
        """Bytes of the copies that the request holds."""
        return sum(self._copies[each].copy.plan.nbytes for each in request.held if each in self._copies)

    def _misfit(self, request_id: str, request: _Parked, item: NeededItem, misfit: str) -> _Verdict:
        """A copy that does not fit: the engine encodes the item if the copy, which it would take, can go."""
        others = self._holders[item.identifier] - {request_id}
        if item.has_media and not others and self._is_settled(item.identifier):
            self._drop(item.identifier)
            return self._without(request_id, request, item, misfit)
        self._log_unavailable(request_id, item, misfit)
        return _Verdict.FAIL

    def _without(self, request_id: str, request: _Parked, item: NeededItem, reason: str) -> _Verdict:
        """The item has to do without the store."""
        if item.has_media:
            request.encoded.add(item.identifier)
            logger.debug("vLLM encodes %s itself: %s", short(item.identifier), reason)
            return _Verdict.ENCODE
        self._log_unavailable(request_id, item, reason)
        return _Verdict.FAIL

    def _log_unavailable(self, request_id: str, item: NeededItem, reason: str) -> None:
        logger.warning("request %s cannot be served: %s: %s", request_id, short(item.identifier), reason)

    def _take_reports(self, now: float) -> None:
        for report in self._loads.reports():
            self._loading.discard(report.identifier)
            if report.copy is not None:
                self._misses.pop(report.identifier, None)
                self._copies[report.identifier] = _Copy(report.copy)
            elif report.identifier in self._holders:
                before = self._misses.get(report.identifier)
                pause = _FIRST_PAUSE if before is None else min(2 * before.pause, _LONGEST_PAUSE)
                if report.outcome is LoadOutcome.NO_SPACE and report.nbytes <= self._limits.host_memory:
                    self._make_room(report.identifier, report.missing_bytes)
                    pause = _FIRST_PAUSE
                self._misses[report.identifier] = _Miss(report.reason, now + pause, pause, report.nbytes)

    def _make_room(self, identifier: str, nbytes: int) -> None:
        """Drops copies that nothing holds, then those that only requests parked later hold.

        Without the latter, two requests that each hold a part of the memory would wait for each other.
        """
        for victim in list(self._droppable(identifier)):
            if nbytes <= 0:
                return
            nbytes -= self._copies[victim].copy.plan.nbytes
            self._drop(victim)

    def _droppable(self, identifier: str) -> Iterator[str]:
        settled = [each for each in self._copies if self._is_settled(each)]
        yield from (each for each in settled if each not in self._holders)
        ages = {request_id: age for age, request_id in enumerate(self._requests)}
        oldest = min(ages[each] for each in self._holders[identifier])
        later = {
            each: min(ages[holder] for holder in self._holders.get(each, ()))
            for each in settled
            if each in self._holders and self._all_parked(self._holders[each])
        }
        yield from sorted((each for each in later if later[each] > oldest), key=lambda each: -later[each])

    def _all_parked(self, request_ids: Iterable[str]) -> bool:
        return all(self._requests[each].since is not None for each in request_ids)

    def _is_settled(self, identifier: str) -> bool:
        return identifier not in self._used and self._copies[identifier].settled_at <= self._step

    def _drop(self, identifier: str) -> None:
        self._loads.drop(self._copies.pop(identifier).copy)

    def _hold(self, request_id: str, request: _Parked, identifiers: set[str]) -> None:
        """From now on the request holds these items and no others."""
        for identifier in identifiers - request.held:
            self._holders.setdefault(identifier, set()).add(request_id)
        for identifier in request.held - identifiers:
            holders = self._holders[identifier]
            holders.discard(request_id)
            if not holders:
                del self._holders[identifier]
                self._misses.pop(identifier, None)
                if identifier in self._copies:
                    self._copies.move_to_end(identifier)
        request.held = identifiers


def _ambiguous(needed: Sequence[NeededItem]) -> NeededItem | None:
    """An item whose identifier another item of another size has; the copy of one would fill the other."""
    sizes = {item.identifier: item.size for item in needed}
    return next((item for item in needed if sizes[item.identifier] != item.size), None)
