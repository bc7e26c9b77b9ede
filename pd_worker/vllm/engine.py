"""The vLLM engine of a PD worker: the requests that a vLLM server computes for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from triptych.base.config import PDConfig
from triptych.base.delta import Delta
from triptych.base.errors import Unavailable
from triptych.base.metrics import PDMetrics
from triptych.base.types import FinishReason
from triptych.base.vllm_classes import VLLMClass
from triptych.pd_worker.core.admission import SchedulerLimits
from triptych.pd_worker.core.admission import check_request as check_limits
from triptych.pd_worker.core.outputs import Latencies
from triptych.pd_worker.core.request import EngineRequest, RequestKey
from triptych.pd_worker.core.request_events import EngineEvent, OutputProcessor
from triptych.pd_worker.core.tenant_turns import TenantTurns
from triptych.pd_worker.vllm.attempt import StreamPorts
from triptych.pd_worker.vllm.calls import DirectItems, Embeddings, check_request
from triptych.pd_worker.vllm.health import EngineHealth
from triptych.pd_worker.vllm.http.client import EngineInfo, VLLMClient
from triptych.pd_worker.vllm.http.replies import EngineError
from triptych.pd_worker.vllm.kv_transfer import KVTransfer
from triptych.pd_worker.vllm.places import BatchPlaces, EmbeddingMemory
from triptych.pd_worker.vllm.pooled import PooledCalls
from triptych.pd_worker.vllm.run import PrefillShares, RequestRun, RunPorts
from triptych.protos.pd_pb2 import Finished


class EngineMetrics:
    """What this worker sees of its requests; a server's own metrics are at the server."""

    def __init__(self, metrics: PDMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name

    def count(self, events: Iterable[EngineEvent]) -> None:
        metrics = self._metrics
        for event in events:
            if isinstance(event, Delta):
                metrics.generation_tokens.inc(len(event.token_ids))
            elif event.HasField("item_loaded"):
                metrics.ec_load_seconds.observe(event.item_loaded.seconds)
            elif event.HasField("finished"):
                self._finished(event.finished)

    def looked_up(self, items: int, missing: int) -> None:
        """So many items of a request were looked for in the store."""
        for result, count in (("fetched", items - missing), ("missing", missing)):
            if count:
                self._metrics.ec_lookups.labels(self._model_name, result).inc(count)

    def lost(self) -> None:
        self._metrics.engine_losses.inc()

    def gave_way(self) -> None:
        """A request has left vLLM for a tenant that had none there."""
        self._metrics.tenant_preemptions.inc()

    def show(
        self,
        *,
        running: int,
        waiting: int,
        tenants_waiting: int,
        kv_usage: float,
        reserved: int,
        up: bool,
        latencies: Latencies,
    ) -> None:
        """The gauges now, and latencies since the last call."""
        metrics = self._metrics
        metrics.kv_cache_usage.set(kv_usage)
        metrics.requests_running.set(running)
        metrics.requests_waiting.set(waiting)
        metrics.tenants_waiting.set(tenants_waiting)
        metrics.reserved_bytes.set(reserved)
        metrics.engine_up.set(up)
        for histogram, values in (
            (metrics.time_to_first_token, latencies.first_token),
            (metrics.inter_token_latency, latencies.between_tokens),
            (metrics.e2e_latency, latencies.whole),
        ):
            for seconds in values:
                histogram.observe(seconds)

    def _finished(self, end: Finished) -> None:
        metrics = self._metrics
        metrics.request_success.labels(self._model_name, end.reason).inc()
        if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            metrics.prompt_tokens.inc(end.prompt_tokens)
            metrics.prefix_queries.inc(end.prompt_tokens)
            metrics.prefix_hits.inc(end.cached_tokens)
            metrics.queue_time.observe(end.queue_seconds)
            metrics.prefill_time.observe(end.prefill_seconds)
            metrics.decode_time.observe(end.decode_seconds)


logger = logging.getLogger(__name__)

#: How long a step that shows that nothing else is at work may take.
_STEP_SECONDS = 8.0


def batch_places(config: PDConfig, info: EngineInfo | None) -> int:
    """Requests that are at vLLM at once: as many as it computes, so that none waits in a queue of its own.

    --max-num-seqs, where it is given and less; where vLLM does not say, that flag.
    """
    given = config.max_num_seqs != PDConfig().max_num_seqs
    if info is None or not info.max_num_seqs:
        return config.max_num_seqs
    return min(config.max_num_seqs, info.max_num_seqs) if given else info.max_num_seqs


class VLLMEngine:
    """The engine as the servicer uses it, in one event loop. `emit` gets each event as it comes.

    `on_lost` is called when the server has ended, after its requests were dropped without an event.
    """

    def __init__(
        self,
        config: PDConfig,
        client: VLLMClient,
        embeddings: Embeddings,
        health: EngineHealth,
        emit: Callable[[list[EngineEvent]], None],
        metrics: EngineMetrics,
        *,
        vocab_size: int,
        pooled: PooledCalls,
        max_model_len: int,
        model_class: VLLMClass,
        on_lost: Callable[[], None],
        direct: DirectItems | None = None,
        transfer: KVTransfer | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self._class = model_class
        self._config = config
        places = batch_places(config, health.info)
        self._limits = SchedulerLimits(places, max_model_len, max_model_len)
        self._client = client
        self._health = health
        self._emit_events = emit
        self._metrics = metrics
        self._on_lost = on_lost
        self._outputs = OutputProcessor(max_model_len)
        self._turns = TenantTurns()
        self._room = EmbeddingMemory(config.embedding_memory, self._turns)
        self._prefills = PrefillShares()
        self._places = BatchPlaces(places, self._turns, metrics.gave_way)
        stream = StreamPorts(
            client,
            self._outputs,
            self._emit,
            health.note_progress,
            vocab_size,
            direct,
            lambda: health.speculates,
            model_class.image_kind,
        )
        self._ports = RunPorts(
            stream,
            embeddings,
            self._room,
            self._places,
            self._prefills,
            health.poll,
            metrics.looked_up,
            pooled,
            self._turns,
            transfer,
        )
        self._runs: dict[RequestKey, RequestRun] = {}
        self._tasks: dict[RequestKey, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()
        health.watch(self._lose, lambda: any(run.streaming for run in self._runs.values()))

    @property
    def places(self) -> int:
        """Requests that are at vLLM at once, by what it last said."""
        return batch_places(self._config, self._health.info)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._runs)

    def submit(self, request: EngineRequest) -> None:
        """Starts a request. InvalidRequest for what vLLM cannot do, Unavailable while it is not there."""
        check_limits(request, self._limits, None)
        check_request(request, self._class, speculates=self._health.speculates)
        self._ports.pooled.check(request)
        if not self._health.up:
            raise Unavailable("this worker's engine, vLLM, does not answer", retry_after=1.0)
        # It may have come back with another number.
        self._places.resize(self.places)
        key = request.key
        self._turns.add(request.tenant)
        run = self._runs[key] = RequestRun(request, self._ports)
        task = self._tasks[key] = asyncio.create_task(run.run(), name=f"vllm {request.request_id}")
        task.add_done_callback(lambda done: self._forget(request, done))

    def items_ready(self, mm_hashes: Sequence[str]) -> None:
        """These embeddings are in the store."""
        for run in list(self._runs.values()):
            run.items_stored(mm_hashes)

    def fail_unloaded(self) -> None:
        """Ends requests that wait for embeddings: this worker does not reach the store."""
        for key, run in list(self._runs.items()):
            if run.fail_unloaded():
                self._tasks[key].cancel()

    def cancel(self, request_ids: Iterable[str], proxy_id: str) -> None:
        """Ends requests here and in vLLM; unknown ones are ignored."""
        for request_id in request_ids:
            if (task := self._tasks.get((proxy_id, request_id))) is not None:
                task.cancel()

    def pause(self, paused: Sequence[str], resumed: Sequence[str], proxy_id: str) -> None:
        """Nothing: vLLM cannot pause a request. Its proxy ends one whose output is not read."""

    def between_steps(self, callback: Callable[[], None]) -> None:
        """Calls back once vLLM has made a step in which no earlier request had a part."""
        task = asyncio.create_task(self._after_step(list(self._tasks.values()), callback), name="vllm step")
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    async def close(self) -> None:
        """Ends all requests, without events."""
        tasks = [*self._tasks.values(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def show_metrics(self) -> int:
        """Updates gauges and latencies; called regularly. Returns the requests that vLLM computes."""
        running = sum(run.streaming for run in self._runs.values())
        self._metrics.show(
            running=running,
            waiting=len(self._runs) - running,
            tenants_waiting=self._turns.waiting(),
            kv_usage=self._health.kv_usage if running else 0.0,
            reserved=self._room.reserved,
            up=self._health.up,
            latencies=self._outputs.drain_latencies(),
        )
        return running

    async def _after_step(self, tasks: Sequence[asyncio.Task[None]], callback: Callable[[], None]) -> None:
        ending = [task for task in tasks if task.cancelling()]
        await asyncio.gather(*ending, return_exceptions=True)
        try:
            await self._client.probe(_STEP_SECONDS)
        except EngineError as error:
            logger.info("vLLM has made no step: %s", error)
            return
        callback()

    def _emit(self, events: list[EngineEvent]) -> None:
        self._metrics.count(events)
        for event in events:
            if isinstance(event, Delta):
                self._prefills.decoded += len(event.token_ids)
                if (run := self._runs.get((event.proxy_id, event.request_id))) is not None:
                    self._turns.charge(run.request.tenant, len(event.token_ids))
        self._emit_events(events)

    def _forget(self, request: EngineRequest, task: asyncio.Task[None]) -> None:
        self._turns.remove(request.tenant)
        key = request.key
        if self._tasks.get(key) is task:
            del self._tasks[key], self._runs[key]

    def _lose(self) -> None:
        """The server has ended, or stands still."""
        logger.warning("vLLM is lost with %d requests, which go on elsewhere", len(self._tasks))
        self._metrics.lost()
        for task in self._tasks.values():
            task.cancel()
        self._on_lost()
