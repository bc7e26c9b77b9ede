"""Holding a cluster open at one stage of its requests' lives, to break it just there.

Every stage begins with all encoders stopped (SIGSTOP) until enough requests have gathered, so that none is
over before the stage is reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable

from support.cluster import Cluster, wait_for

#: Requests that must be unfinished when something is killed.
UNFINISHED = 25


async def hold(what: str, holds: Callable[[], bool]) -> None:
    """Waits for a stage without stopping the clients, which share this event loop."""
    await asyncio.to_thread(wait_for, what, holds)


def unfinished(cluster: Cluster) -> int:
    return int(cluster.total("proxy", "triptych_requests_in_flight"))


async def gathered(cluster: Cluster) -> None:
    """Waits until UNFINISHED requests are under way."""
    await hold(f"{UNFINISHED} requests in flight", lambda: unfinished(cluster) >= UNFINISHED)


def assert_unfinished(cluster: Cluster) -> None:
    """At least UNFINISHED requests are still under way."""
    assert unfinished(cluster) >= UNFINISHED


def kill_unfinished(cluster: Cluster, name: str) -> None:
    """Kills a process that has requests under way: it is stopped first, so that none ends meanwhile."""
    cluster.kill(name, signal.SIGSTOP)
    assert_unfinished(cluster)
    cluster.kill(name)


def close_gate(cluster: Cluster) -> None:
    """Stops all encoders: requests with pictures gather in front of them."""
    for pool in ("encoder", "pd"):
        cluster.metrics(pool)  # a stopped worker cannot be looked up any more
    for name in cluster.names("encoder"):
        cluster.kill(name, signal.SIGSTOP)


def open_gate(cluster: Cluster) -> None:
    _go_on(cluster, "encoder")


def _go_on(cluster: Cluster, pool: str) -> None:
    for name in cluster.names(pool):
        with contextlib.suppress(ProcessLookupError):  # the one that was killed
            cluster.kill(name, signal.SIGCONT)


async def _let_go(cluster: Cluster) -> None:
    await gathered(cluster)
    open_gate(cluster)


async def kill_queued(cluster: Cluster) -> None:
    """Items wait for encoders that have stopped."""
    await hold("items waiting", lambda: cluster.total("proxy", "triptych_waiting_items") > 0)
    await gathered(cluster)
    cluster.kill("encoder-0")
    open_gate(cluster)


async def kill_encoding(cluster: Cluster) -> None:
    """The tower has an item."""
    await _let_go(cluster)
    await hold("the tower at work", lambda: cluster.total("encoder", "triptych_encoder_inflight") > 0)
    kill_unfinished(cluster, "encoder-0")


async def kill_saved(cluster: Cluster) -> None:
    """Embeddings are in the store, and the PD workers that should load them have stopped."""

    def published() -> float:
        return cluster.total("proxy", "triptych_published_bytes")

    def caught() -> bool:
        """Stops the PD workers while there is something that they have not loaded."""
        if not published():
            return False
        for name in cluster.names("pd"):
            cluster.kill(name, signal.SIGSTOP)
        if published():
            return True
        _go_on(cluster, "pd")
        return False

    await _let_go(cluster)
    await hold("embeddings that nobody has loaded", caught)
    await hold("them to be saved", lambda: not cluster.total("encoder", "triptych_encoder_inflight"))
    assert published()
    assert_unfinished(cluster)
    cluster.kill("pd-0")
    _go_on(cluster, "pd")


async def kill_prefill(cluster: Cluster) -> None:
    """Prompts with pictures are computed in chunks."""
    before = cluster.total("pd", "triptych_pd_chunked_prefills_total")
    await _let_go(cluster)
    await hold("a prefill", lambda: cluster.total("pd", "triptych_pd_chunked_prefills_total") > before)
    kill_unfinished(cluster, "pd-0")


async def kill_midstream(cluster: Cluster) -> None:
    """Tokens flow."""
    before = cluster.total("pd", "vllm:generation_tokens_total")
    await _let_go(cluster)
    await hold("tokens", lambda: cluster.total("pd", "vllm:generation_tokens_total") > before + 50)
    kill_unfinished(cluster, "pd-0")
