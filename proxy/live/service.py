"""Live data of one proxy, from its parts to its routes."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.routing import Route

from triptych.config import ProxyConfig
from triptych.ec_connector.store.results import StoreMemory
from triptych.metrics import ProxyMetrics
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.live.calls import CallLog
from triptych.proxy.live.cluster_view import ClusterSources, ClusterView
from triptych.proxy.live.endpoint import live_routes
from triptych.proxy.live.failures import MAX_REFUSALS, FailureLog
from triptych.proxy.live.feed import LiveFeed
from triptych.proxy.live.goodput import GoodputWindow, Slo
from triptych.proxy.pool import WorkerPool
from triptych.scaling import ScalingDecision


class LiveData:
    """`calls` observes the dispatcher from its making on; `start` begins to look at the cluster."""

    def __init__(self, config: ProxyConfig, pool: WorkerPool) -> None:
        self._max_queue = config.max_queue
        self._pool = pool
        self._goodput = GoodputWindow(Slo(config.page_ttft_slo, config.page_tpot_slo))
        self._failures = FailureLog()
        self._refusals = FailureLog(MAX_REFUSALS)
        self._feed: LiveFeed | None = None
        self.calls = CallLog(self._goodput, self._failures, self._model_name)

    def start(
        self,
        dispatcher: Dispatcher,
        metrics: ProxyMetrics,
        proxy_id: str,
        *,
        decision: Callable[[str], ScalingDecision | None] = lambda pool: None,
        store_memory: Callable[[], StoreMemory | None] = lambda: None,
    ) -> list[Route]:
        """Looks at the cluster every second from now on; the routes that show what is seen."""
        sources = ClusterSources(
            dispatcher=dispatcher,
            pool=self._pool,
            metrics=metrics,
            calls=self.calls,
            goodput=self._goodput,
            failures=self._failures,
            refusals=self._refusals,
            proxy_id=proxy_id,
            max_queue=self._max_queue,
            decision=decision,
            store_memory=store_memory,
        )
        self._feed = LiveFeed(ClusterView(sources), dispatcher.quotas["listeners"])
        self._feed.start()
        return live_routes(self._feed, self.calls)

    def refused(self, status: int, route: str) -> None:
        """A request that was refused before it was a call."""
        self._refusals.add_refusal(time.time(), status, route)

    def drain(self) -> None:
        """Ends all streams."""
        if self._feed is not None:
            self._feed.drain()

    async def stop(self) -> None:
        if self._feed is not None:
            await self._feed.stop()

    def _model_name(self, name: str) -> str:
        """The model that a call means: where it names none, the only one."""
        models = [] if name else self._pool.models()
        return name or (models[0] if models else "")
