"""What a simulation has found: the records of a measured window, and what the cluster did for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.goodput.load.record import RequestRecord


@dataclass(slots=True)
class Counters:
    """Of the whole simulation, warm-up included; `seconds` is its virtual length.

    `utilisation` is the share of time in which towers ("encoder") and steps ("pd") were under way, over the
    workers of the pool; "proxy" is the CPU seconds of the one proxy per second, above 1 when one is not
    enough. `items`: those of answered requests, by where they were found; `loaded_bytes`: out of the store.
    """

    seconds: float = 0.0
    requests: int = 0
    refused: int = 0
    tower_calls: int = 0
    tower_items: int = 0
    items: dict[str, int] = field(default_factory=dict)
    re_encodes: int = 0
    store_evictions: int = 0
    loaded_bytes: int = 0
    steps: int = 0
    jumped_steps: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    tokens: int = 0
    utilisation: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Simulation:
    """`records` stand in the order of the load. `leftovers` are all zero once every request has ended."""

    records: tuple[RequestRecord, ...]
    counters: Counters
    leftovers: Mapping[str, int]
