"""What a cluster holds when it has nothing to do: nothing."""

from __future__ import annotations

from support.processes.cluster import Cluster, wait_for

GAUGES = {
    "proxy": (
        "triptych_requests_in_flight",
        "triptych_published_bytes",
        "triptych_waiting_items",
        "triptych_media_bytes",
    ),
    "encoder": (
        "triptych_encoder_jobs",
        "triptych_encoder_queue_items",
        "triptych_encoder_planned_items",
        "triptych_encoder_inflight",
        "triptych_encoder_leases_held",
    ),
    "pd": (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "triptych_pd_kv_blocks_used",
        "triptych_pd_encoder_cache_references",
        "triptych_pd_reserved_bytes",
    ),
}


def held(cluster: Cluster) -> dict[str, float]:
    """Every gauge of references, blocks, leases and jobs that is not zero."""
    values: dict[str, float] = {}
    for pool, names in GAUGES.items():
        for samples in cluster.metrics(pool):
            values |= {f"{pool} {name}": samples[name] for name in names if samples[name]}
    return values


def assert_at_rest(cluster: Cluster) -> None:
    """All references, blocks, leases and jobs return to zero within the test's patience."""
    last: dict[str, float] = {}

    def empty() -> bool:
        nonlocal last
        last = held(cluster)
        return not last

    try:
        wait_for("the cluster to hold nothing", empty, 30)
    except AssertionError:
        raise AssertionError(f"still held: {last}") from None
