"""What a simulation has found: the records of a measured window, and what the cluster did for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triptych.goodput.load.record import RequestRecord
from triptych.simulator.cluster.cluster import SimulatedCluster


@dataclass(frozen=True, slots=True)
class Counters:
    """Of the whole simulation, warm-up included; `seconds` is its virtual length.

    `utilisation` is the share of time in which towers ("encoder") and steps ("pd") were under way, over the
    workers of the pool; "proxy" is the CPU seconds of the one proxy per second, above 1 when one is not
    enough. `loaded_bytes`: out of the store.
    """

    seconds: float
    requests: int
    refused: int
    tower_calls: int
    tower_items: int
    items: Mapping[str, int]
    re_encodes: int
    store_evictions: int
    loaded_bytes: int
    steps: int
    jumped_steps: int
    prefill_tokens: int
    preemptions: int
    tokens: int
    utilisation: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Simulation:
    """`records` stand in the order of the load. `leftovers` are all zero once every request has ended."""

    records: tuple[RequestRecord, ...]
    counters: Counters
    leftovers: Mapping[str, int]


def count(cluster: SimulatedCluster, records: tuple[RequestRecord, ...], seconds: float) -> Counters:
    """The counters of a cluster after `seconds`."""
    encoders, workers = cluster.encoders.values(), cluster.workers.values()
    proxy, store = cluster.proxy, cluster.store
    items: dict[str, int] = {}
    for record in records:
        for origin in record.caches if record.ok else ():
            items[origin] = items.get(origin, 0) + 1
    return Counters(
        seconds=seconds,
        requests=proxy.counts.requests,
        refused=proxy.counts.refused,
        tower_calls=sum(encoder.counts.tower_calls for encoder in encoders),
        tower_items=sum(encoder.counts.tower_items for encoder in encoders),
        items=items,
        re_encodes=proxy.re_encodes,
        store_evictions=store.evictions,
        loaded_bytes=store.loaded_bytes,
        steps=sum(worker.counts.steps for worker in workers),
        jumped_steps=sum(worker.counts.jumped for worker in workers),
        prefill_tokens=sum(worker.counts.prefill_tokens for worker in workers),
        preemptions=sum(worker.counts.preemptions for worker in workers),
        tokens=cluster.transport.tokens,
        utilisation=_utilisation(cluster, seconds),
    )


def _utilisation(cluster: SimulatedCluster, seconds: float) -> dict[str, float]:
    encoders, workers = cluster.encoders.values(), cluster.workers.values()
    relay = cluster.transport.tokens * cluster.transport.token_seconds
    busy = {
        "pd": sum(worker.counts.seconds for worker in workers) / len(workers),
        "proxy": cluster.proxy.counts.intake_seconds + relay,
    }
    if encoders:
        busy["encoder"] = sum(encoder.counts.tower_seconds for encoder in encoders) / len(encoders)
    return {name: spent / seconds for name, spent in busy.items()}
