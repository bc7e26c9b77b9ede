"""The scheduler's figures for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class ItemStats:
    """Current gauges of embeddings, and counts of where items were found since the last report."""

    cross_tables: int = 0
    encoder_cache_bytes: int = 0
    encoder_cache_references: int = 0
    reserved_bytes: int = 0
    resident: int = 0
    fetched: int = 0
    missing: int = 0
    load_seconds: list[float] = field(default_factory=list)
    load_bytes: int = 0
    #: Loads by their paths.
    loads: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class OverlapStats:
    """Counts of prefill before all items are there: requests, tokens, tokens that were evicted before use."""

    requests: int = 0
    tokens: int = 0
    lost_tokens: int = 0


@dataclass(slots=True)
class Latencies:
    """Latencies in seconds since the last report: to the first token, between tokens, of whole requests."""

    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Current gauges, and counts and latencies since the last report."""

    num_running: int
    num_waiting: int
    item_pressure: float
    kv_blocks: int
    kv_blocks_used: int
    host_blocks_used: int
    state_slots_used: int
    state_snapshots: int
    items: ItemStats
    overlap: OverlapStats
    latencies: Latencies
