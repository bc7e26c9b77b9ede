"""Holding a cluster open at one stage of its requests' lives, to break it just there."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from support.cluster import Cluster, wait_for

#: Requests that must be unfinished when something is killed.
UNFINISHED = 25


async def hold(what: str, holds: Callable[[], bool]) -> None:
    """Waits for a stage without stopping the clients, which share this event loop."""
    await asyncio.to_thread(wait_for, what, holds)


def unfinished(cluster: Cluster) -> int:
    return int(cluster.metrics("proxy")[0]["triptych_requests_in_flight"])


async def assert_unfinished(cluster: Cluster) -> None:
    """At least UNFINISHED requests are under way."""
    await hold(f"{UNFINISHED} requests in flight", lambda: unfinished(cluster) >= UNFINISHED)


async def kill_queued(cluster: Cluster) -> None:
    """Items wait for an encoder that has stopped."""
    await hold("items waiting", lambda: cluster.metrics("proxy")[0]["triptych_waiting_items"] > 0)
    await assert_unfinished(cluster)
    await asyncio.to_thread(cluster.kill, "encoder-0")


async def kill_encoding(cluster: Cluster) -> None:
    """The tower has an item."""
    await hold("the tower at work", lambda: cluster.total("encoder", "triptych_encoder_inflight") > 0)
    await asyncio.to_thread(cluster.kill, "encoder-0", signal.SIGSTOP)
    await assert_unfinished(cluster)
    await asyncio.to_thread(cluster.kill, "encoder-0")


async def kill_saved(cluster: Cluster) -> None:
    """Embeddings are in the store, and the PD worker that should load them has stopped."""
    await hold("admitted items", lambda: cluster.total("pd", "triptych_pd_reserved_bytes") > 0)
    await asyncio.to_thread(cluster.kill, "pd-0", signal.SIGSTOP)
    await hold("published bytes", lambda: cluster.metrics("proxy")[0]["triptych_published_bytes"] > 0)
    await assert_unfinished(cluster)
    await asyncio.to_thread(cluster.kill, "pd-0")


async def kill_prefill(cluster: Cluster) -> None:
    """Prompt chunks have been computed, and nobody has a token."""
    await hold("a prefill under way", lambda: cluster.total("pd", "triptych_pd_chunked_prefills_total") > 0)
    await assert_unfinished(cluster)
    await asyncio.to_thread(cluster.kill, "pd-0")


async def kill_midstream(cluster: Cluster) -> None:
    """Tokens flow."""
    await hold("tokens", lambda: cluster.total("pd", "vllm:generation_tokens_total") > 300)
    await assert_unfinished(cluster)
    await asyncio.to_thread(cluster.kill, "pd-0")
