"""Start of autoscaling in the proxy's process, and of KEDA's scaler where it has a port."""

from __future__ import annotations

import contextlib

from triptych.base.config.proxy import ScalingConfig
from triptych.base.metrics import ProxyMetrics
from triptych.base.rpc.tls.certificates import Certificates
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.scaling.autoscaler import Autoscaler
from triptych.proxy.scaling.keda import ScalerServer
from triptych.proxy.scaling.pools import make_pools
from triptych.proxy.workers import KnownWorkers
from triptych.registry.scaling import ScalingBoard
from triptych.store.embedding_store import EmbeddingStore


async def start_scaling(
    config: ScalingConfig,
    store: EmbeddingStore,
    workers: KnownWorkers,
    dispatcher: Dispatcher,
    metrics: ProxyMetrics,
    proxy_id: str,
    stack: contextlib.AsyncExitStack,
    certificates: Certificates | None = None,
) -> Autoscaler | None:
    """Starts the autoscaler, which `stack` ends; None where no pool is scaled."""
    pools = make_pools(config, workers, dispatcher.jobs, lambda: dispatcher.pd_load)
    if not pools:
        return None
    autoscaler = Autoscaler(ScalingBoard(store), pools, workers, metrics, proxy_id)
    dispatcher.jobs.on_arrival = workers.on_unbound = autoscaler.item_waits
    if config.scaler_port:
        scaler = ScalerServer(autoscaler, certificates)
        stack.push_async_callback(scaler.stop)
        await scaler.start(config.scaler_host, config.scaler_port)
    autoscaler.start()
    stack.push_async_callback(autoscaler.stop)
    return autoscaler
