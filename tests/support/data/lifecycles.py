"""State machines of requests that have come some way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from support.data.items import bare_plan
from support.data.job_events import job_planned, job_ready
from support.data.pd_events import pd_admitted
from triptych.base.types import ItemPlan
from triptych.protos.pd_pb2 import ItemState
from triptych.proxy import events
from triptych.proxy.requests import instructions as do
from triptych.proxy.requests.lifecycle import Lifecycle

IDS = (7, 8)
PLACES = [(0, 1)]


def begun(*keys: str, **params: str) -> Lifecycle:
    """A request with these items, whose media are there."""
    machine = Lifecycle()
    machine.deliver(events.Fetched(dict.fromkeys(keys, "") | params, 0.0))
    return machine


def looked_up(machine: Lifecycle, *stored: str, expected: str = "") -> Sequence[do.Instruction]:
    return machine.deliver(events.LookedUp(plans(stored), plans(expected)))


def plans(keys: Iterable[str]) -> dict[str, ItemPlan]:
    return {key: bare_plan(key) for key in keys}


def planned(key: str) -> events.JobEvent:
    return job_planned(key, bare_plan(key))


def ready(key: str) -> events.JobEvent:
    return job_ready(key, bare_plan(key))


def at_worker(*keys: str) -> Lifecycle:
    """A request whose items are all stored and that a worker has admitted."""
    machine = begun(*keys)
    looked_up(machine, *keys)
    machine.deliver(events.Accepted(1))
    machine.deliver(pd_admitted(1, IDS, PLACES))
    return machine


def states(machine: Lifecycle) -> dict[str, ItemState]:
    """What a PD worker is told of the embeddings."""
    return {key: item.state for key, item in machine.items.items()}
