"""Spread of planned jobs over encoders that have come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from triptych.proxy.encoders.job import EncoderJob, EncoderSlot, JobState


def sooner_elsewhere(
    able: Sequence[EncoderSlot],
    jobs: Iterable[EncoderJob],
    work: Callable[[str, str], float],
    cost: Callable[[EncoderJob, str], float],
) -> list[EncoderJob]:
    """The planned jobs that another encoder would have done sooner, were those before them moved.

    In seconds of tower time: `work` of an address and its kind, `cost` of a job at a kind.
    """
    owed = {slot.address: work(slot.address, slot.kind) for slot in able}
    kinds: dict[str, list[str]] = {}
    for slot in able:
        kinds.setdefault(slot.kind, []).append(slot.address)
    moved = []
    for job in jobs:
        if job.state is not JobState.PLANNED:
            continue
        costs = {min(addresses, key=owed.__getitem__): cost(job, kind) for kind, addresses in kinds.items()}
        best = min(costs, key=lambda address: owed[address] + costs[address])
        if owed[best] + costs[best] < owed.get(job.address, 0.0) * (1.0 - 1e-9):
            owed[best] += costs[best]
            owed[job.address] -= cost(job, job.kind)
            moved.append(job)
    return moved
