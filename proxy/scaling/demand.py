"""Demand of one proxy: what its encoder jobs and its requests ask of the two pools."""

from __future__ import annotations

import math
from collections.abc import Iterable

from triptych.base.scaling import PoolDemand
from triptych.proxy.encoders.outstanding import (
    FAST_SECONDS,
    SLOW_SECONDS,
    ArrivedItems,
    Items,
    OutstandingItems,
)
from triptych.proxy.encoders.work_model import LEAST_WORK, WorkModel


def encoder_demand(
    outstanding: OutstandingItems,
    arrived: ArrivedItems,
    model: WorkModel,
    *,
    now: float,
    kind: str,
    jobs: int,
    unbound: int = 0,
) -> PoolDemand:
    """Demand for encoders, in seconds of a worker of this kind.

    `jobs` are all jobs, those too that wait for a PD worker's room and that no further encoder would help.
    `unbound` are requests whose items have no job yet, since no encoder has ever been there. While no cost is
    known items count, but no seconds: the first worker finds out.
    """
    waiting = outstanding.waiting + unbound
    if not model.kinds:
        return PoolDemand(backlog=LEAST_WORK * jobs, waiting=waiting)

    def seconds(items: Items) -> float:
        return max(model.total(items.unknown, items.known, items.patches, kind), 0.0)

    size, items = outstanding.largest, outstanding.items
    largest = model.work(size, kind) if size is not None else 0.0
    if items.unknown or unbound:
        largest = max(largest, model.work(None, kind))
    backlog = seconds(items) + unbound * model.work(None, kind)
    fast, slow = arrived.rates(now)
    return PoolDemand(max(backlog, LEAST_WORK * jobs), waiting, largest, seconds(fast), seconds(slow))


class PDDemand:
    """Demand for PD workers, in workers filled with requests, of which one takes `max_num_seqs` at once.

    Requests come and go by themselves, so that their number is averaged, and not their arrivals.
    """

    def __init__(self) -> None:
        self._fast = self._slow = 0.0
        self._at: float | None = None

    def look(self, in_flight: int, waiting: int, max_num_seqs: int, now: float) -> PoolDemand:
        """`waiting` of the requests `in_flight` are at no PD worker yet."""
        level = in_flight / max(max_num_seqs, 1)
        step = 0.0 if self._at is None else max(now - self._at, 0.0)
        self._at = now
        self._fast = _towards(self._fast, level, step, FAST_SECONDS)
        self._slow = _towards(self._slow, level, step, SLOW_SECONDS)
        # While none waits, those in flight are in good hands.
        backlog = level if waiting else 0.0
        return PoolDemand(backlog, waiting, 0.0, self._fast, self._slow)


def total_demand(demands: Iterable[PoolDemand]) -> PoolDemand:
    """The demand of several proxies together."""
    found = list(demands)
    return PoolDemand(
        math.fsum(one.backlog for one in found),
        sum(one.waiting for one in found),
        max((one.largest for one in found), default=0.0),
        math.fsum(one.fast for one in found),
        math.fsum(one.slow for one in found),
        max((one.kept for one in found if one.kept is not None), default=None),
    )


def _towards(average: float, level: float, step: float, seconds: float) -> float:
    return level + (average - level) * math.exp(-step / seconds)
