"""Prometheus metrics of every role: names, labels and buckets.

PD workers use vLLM's names, so that existing dashboards work; everything else is `triptych_*`.
"""

from __future__ import annotations

from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)

from triptych import __version__

# They would double the series of counters and histograms, and no query of ours needs them.
disable_created_metrics()  # type: ignore[no-untyped-call]

#: Kinds of workers that have a series of their own; a registration may name any kind.
MAX_KINDS = 64
#: The kind of all others.
OTHER_KIND = "other"

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def new_registry() -> CollectorRegistry:
    """A registry with the process's own metrics: its version, memory, CPU time, files and start."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("triptych_build", "version of this process", registry=registry).info({"version": __version__})
    return registry


class _ModelMetrics:
    """The metrics of one worker, all with the label `model_name`."""

    def __init__(self, model_name: str, registry: CollectorRegistry | None) -> None:
        self.registry = registry or new_registry()
        self._model_name = model_name

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        found = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return found.labels(self._model_name)

    def _counter_by(self, label: str, name: str, text: str) -> Counter:
        """A counter with a second label."""
        return Counter(name, text, ["model_name", label], registry=self.registry)


class PDMetrics(_ModelMetrics):
    """The metrics of one PD worker, all labelled with `model_name`.

    `parameter_bytes` is the process's gauge where an encoder worker shares process and registry.
    """

    def __init__(
        self,
        model_name: str,
        registry: CollectorRegistry | None = None,
        parameter_bytes: Gauge | None = None,
    ) -> None:
        super().__init__(model_name, registry)
        self._add_requests()
        self._add_steps()
        self._add_memory()
        self._add_transfers()
        self.engine_up = self._gauge(
            "triptych_pd_engine_up", "1 while vLLM generates, with --engine vllm, else 0"
        )
        self.engine_losses = self._counter(
            "triptych_pd_engine_losses", "times that vLLM has gone, with --engine vllm"
        )
        self.parameter_bytes = parameter_bytes or self._gauge(
            "triptych_parameter_bytes", "bytes of this process's parameters"
        )

    def _add_requests(self) -> None:
        """Under vLLM's names."""
        self.requests_running = self._gauge("vllm:num_requests_running", "requests in the running batch")
        self.requests_waiting = self._gauge(
            "vllm:num_requests_waiting", "requests waiting for room or embeddings"
        )
        self.kv_cache_usage = self._gauge("vllm:kv_cache_usage_perc", "share of KV blocks in use, 0 to 1")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "prompt tokens prefilled")
        self.generation_tokens = self._counter("vllm:generation_tokens", "tokens generated")
        self.preemptions = self._counter("vllm:num_preemptions", "requests preempted")
        self.prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "prompt tokens looked up in the prefix cache"
        )
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "prompt tokens found in the prefix cache")
        self.iteration_tokens = self._histogram("vllm:iteration_tokens_total", "tokens of one step", _COUNTS)
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "from arrival to first token"
        )
        self.inter_token_latency = self._histogram("vllm:inter_token_latency_seconds", "between two tokens")
        self.e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "from arrival to the last token"
        )
        self.queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "from arrival to the first chunk"
        )
        self.prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "from first chunk to first token"
        )
        self.decode_time = self._histogram("vllm:request_decode_time_seconds", "from first to last token")
        self.request_success = self._counter_by(
            "finished_reason", "vllm:request_success", "finished requests"
        )

    def _add_steps(self) -> None:
        self.ranks = self._gauge(
            "triptych_pd_ranks", "processes that share the decoder, by --tensor-parallel"
        )
        self.busy = self._gauge(
            "triptych_pd_busy", "share of the last 10 s in which the engine worked on steps, 0 to 1"
        )
        self.batch_requests = self._histogram("triptych_pd_batch_requests", "requests in one step", _COUNTS)
        self.chunked_prefills = self._counter(
            "triptych_pd_chunked_prefills", "prefill chunks that did not end a prompt"
        )
        self.overlap_requests = self._counter(
            "triptych_pd_overlap_requests", "requests prefilled in part before all of their items were there"
        )
        self.overlap_tokens = self._counter(
            "triptych_pd_overlap_tokens",
            "prompt tokens prefilled before all items of their request were there",
        )
        self.overlap_lost_tokens = self._counter(
            "triptych_pd_overlap_lost_tokens", "those of them that were evicted before their request started"
        )
        self.graph_steps = self._counter("triptych_pd_graph_steps", "steps replayed as a decode graph")

    def _add_memory(self) -> None:
        self.kv_blocks_used = self._gauge("triptych_pd_kv_blocks_used", "KV blocks that requests hold")
        self.cross_tables = self._gauge(
            "triptych_pd_cross_tables", "cross-attention tables that requests share"
        )
        self.projections = self._counter(
            "triptych_pd_projections", "encoder outputs projected into cross tables"
        )
        self.host_blocks_used = self._gauge(
            "triptych_pd_host_blocks_used", "KV blocks swapped out to host memory"
        )
        self.state_slots_used = self._gauge(
            "triptych_pd_state_slots_used", "slots of recurrent states that requests hold"
        )
        self.state_snapshots = self._gauge(
            "triptych_pd_state_snapshots", "recurrent states kept for equal prefixes"
        )
        self.swapped_blocks = self._counter("triptych_pd_swapped_blocks", "KV blocks swapped out")
        self.encoder_cache_bytes = self._gauge(
            "triptych_pd_encoder_cache_bytes", "bytes of resident embeddings"
        )
        self.encoder_cache_references = self._gauge(
            "triptych_pd_encoder_cache_references", "references to embeddings"
        )
        self.reserved_bytes = self._gauge(
            "triptych_pd_reserved_bytes", "bytes reserved for admitted requests' items"
        )

    def _add_transfers(self) -> None:
        self.ec_load_seconds = self._histogram("triptych_ec_load_seconds", "one load of an embedding")
        self.ec_load_bytes = self._counter("triptych_ec_load_bytes", "bytes of loaded embeddings")
        self.ec_loads = self._counter_by("path", "triptych_ec_loads", "loads by path: shm, peer or store")
        self.ec_lookups = self._counter_by(
            "result", "triptych_ec_lookups", "items asked for, by where they were found"
        )


class EncoderMetrics(_ModelMetrics):
    """The metrics of one encoder worker."""

    def __init__(self, model_name: str, registry: CollectorRegistry | None = None) -> None:
        super().__init__(model_name, registry)
        self._add_jobs()
        self._add_graphs()
        self._add_ranks()

    def _add_jobs(self) -> None:
        self.queue_items = self._gauge("triptych_encoder_queue_items", "items waiting for the tower")
        self.planned_items = self._gauge("triptych_encoder_planned_items", "items planned and not yet run")
        self.inflight = self._gauge("triptych_encoder_inflight", "items in the tower or being saved")
        self.jobs = self._gauge("triptych_encoder_jobs", "open jobs")
        self.busy = self._gauge(
            "triptych_encoder_busy", "share of the last 10 s in which the tower worked, 0 to 1"
        )
        self.tower_items = self._counter("triptych_encoder_tower_items", "items that the tower has encoded")
        self.tower_calls = self._counter("triptych_encoder_tower_calls", "batches that the tower has run")
        self.already_stored = self._counter("triptych_encoder_already_stored", "jobs answered from the store")
        self.batch_items = self._histogram("triptych_encoder_batch_items", "items of one batch", _COUNTS)
        self.encode_seconds = self._histogram("triptych_encode_seconds", "one batch in the tower")
        self.save_seconds = self._histogram("triptych_ec_save_seconds", "one save to the store")
        self.save_bytes = self._counter("triptych_ec_save_bytes", "bytes saved to the store")
        self.leases_held = self._gauge("triptych_encoder_leases_held", "leases of items in the tower")
        self.prepared_bytes = self._gauge("triptych_encoder_prepared_bytes", "bytes of preprocessed pixels")
        self.failures = self._counter_by("code", "triptych_encoder_failures", "jobs that failed")
        self.parameter_bytes = self._gauge("triptych_parameter_bytes", "bytes of this process's parameters")

    def _add_graphs(self) -> None:
        self.graph_hits = self._counter(
            "triptych_encoder_graph_hits", "items encoded by replays of captured tower calls"
        )
        self.graph_misses = self._counter(
            "triptych_encoder_graph_misses", "items larger than any captured tower call, encoded eagerly"
        )
        self.graph_padding_rows = self._counter(
            "triptych_encoder_graph_padding_rows", "rows of replays that no item had"
        )
        self.graph_buffer_bytes = self._gauge(
            "triptych_encoder_graph_buffer_bytes", "bytes of the buffers of captured tower calls"
        )
        self.graph_replays = self._counter_by(
            "token_budget", "triptych_encoder_graph_replays", "replays of captured tower calls, by their rows"
        )

    def _add_ranks(self) -> None:
        self.ranks = self._gauge("triptych_encoder_ranks", "ranks that share the tower's batches")
        self.ranks.set(1)
        self.rank_items = self._counter_by("rank", "triptych_encoder_rank_items", "items given to one rank")
        self.rank_patches = self._counter_by(
            "rank", "triptych_encoder_rank_patches", "patches given to one rank"
        )
        self.rank_failures = self._counter_by(
            "rank", "triptych_encoder_rank_failures", "shares that a rank failed on"
        )


class ProxyMetrics:
    """The metrics of one proxy."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or new_registry()
        self._kinds: set[str] = set()
        self._add_requests()
        self._add_workers()
        self._add_store_and_media()
        self._add_scaling()

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=_SECONDS)

    def _add_requests(self) -> None:
        self.requests = self._counter(
            "triptych_requests", "requests ended, refused ones too", "status", "route"
        )
        self.refusals = self._counter("triptych_refusals", "requests refused for their API key", "reason")
        self.in_flight = self._gauge("triptych_requests_in_flight", "requests that have not ended")
        self.in_flight_limit = self._gauge(
            "triptych_requests_in_flight_limit", "requests in flight from which on new ones get 429"
        )
        self.quota_used = self._gauge("triptych_quota_used", "what is held of a quota", "quota")
        self.quota_capacity = self._gauge("triptych_quota_capacity", "what may be held of a quota", "quota")
        self.poison = self._counter(
            "triptych_poison", "requests and items given up: workers have ended at them", "kind"
        )
        # From 0 on: the first increase of a series that comes with it is not seen.
        for kind in ("request", "item"):
            self.poison.labels(kind)
        self.encoder_jobs = self._counter("triptych_encoder_jobs", "encoder jobs sent", "kind")
        self.items = self._counter("triptych_items", "items of requests, by where they were found", "result")
        self.skipped_jobs = self._counter(
            "triptych_skipped_jobs",
            "encoder jobs put off for items that a PD worker was expected to hold; missing: made after all",
            "result",
        )
        self.resumes = self._counter("triptych_resumes", "requests taken up by another attempt", "reason")
        self.re_encodes = self._counter("triptych_re_encodes", "items encoded again for admitted requests")
        self.published_bytes = self._gauge(
            "triptych_published_bytes", "bytes published in the store and not yet loaded"
        )
        self.waiting_items = self._gauge(
            "triptych_waiting_items", "items and first requests that wait for an encoder"
        )
        self.time_to_first_token = self._histogram(
            "triptych_time_to_first_token_seconds", "from the request's first byte to its first token"
        )
        self.duration = self._histogram(
            "triptych_request_seconds", "from the request's first byte to its end"
        )

    def _add_workers(self) -> None:
        self.workers = self._gauge("triptych_workers", "live workers", "pool")
        self.workers_stalled = self._gauge(
            "triptych_workers_stalled", "registered workers whose engine stands still", "pool"
        )
        self.workers_limit = self._gauge("triptych_workers_limit", "most workers of a scaled pool", "pool")
        self.worker_losses = self._counter(
            "triptych_worker_losses", "registered workers that have stopped answering", "pool"
        )
        self.worker_restarts = self._counter(
            "triptych_worker_restarts", "workers that another process has replaced at its address", "pool"
        )
        self.mismatched_encoders = self._gauge(
            "triptych_mismatched_encoders", "encoders whose embeddings no PD worker takes", "reason"
        )

    def _add_store_and_media(self) -> None:
        self.store_up = self._gauge("triptych_store_up", "1 while the store answers, else 0")
        self.store_used_bytes = self._gauge("triptych_store_used_bytes", "memory that the store uses")
        self.store_max_bytes = self._gauge("triptych_store_max_bytes", "the store's maxmemory; 0: no limit")
        self.store_evictions = self._counter("triptych_store_evictions", "keys that the store has evicted")
        self.media_bytes = self._gauge("triptych_media_bytes", "media of requests in flight", "place")
        self.media_fetches = self._counter(
            "triptych_media_fetches", "media fetched by URL, by outcome", "result"
        )
        self.media_fetched_bytes = self._counter(
            "triptych_media_fetched_bytes", "bytes of media fetched by URL"
        )
        self.media_fetch_seconds = self._histogram(
            "triptych_media_fetch_seconds", "one fetch with its redirects and retries"
        )

    def _add_scaling(self) -> None:
        self.encode_cost = self._gauge(
            "triptych_encode_cost_seconds", "tower time of an average item", "kind"
        )
        self.encoder_backlog = self._gauge(
            "triptych_encoder_backlog_seconds", "outstanding encoder work of all proxies"
        )
        self.encoder_arrivals = self._gauge(
            "triptych_encoder_arrival_seconds",
            "encoder work that arrives in a second, all proxies",
            "average",
        )
        #: By pool; a pool that is not scaled has none.
        self.workers_desired: dict[str, Gauge] = {}
        self.scale_decisions = self._counter(
            "triptych_scale_decisions", "decisions for another number of workers", "pool", "reason"
        )
        self.cold_start = self._gauge(
            "triptych_cold_start_seconds", "from a decision for a worker to its registration", "pool", "kind"
        )

    def kind(self, kind: str) -> str:
        """The label of a kind of worker: itself for the first that come, one for all others."""
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            return OTHER_KIND
        self._kinds.add(kind)
        return kind[:100]

    def show_desired(self, pool: str, workers: int) -> None:
        """The number of workers that a scaled pool should have."""
        if pool not in self.workers_desired:
            self.workers_desired[pool] = Gauge(
                f"triptych_{pool}_workers_desired", "workers that there should be", registry=self.registry
            )
        self.workers_desired[pool].set(workers)


class Expiring(Protocol):
    """Certificates, as a metric shows them."""

    def not_after(self) -> float: ...


def show_expiry(registry: CollectorRegistry, **certificates: Expiring | None) -> None:
    """Adds when each certificate in use expires, in seconds since 1970; None: there is none.

    The names are `internal`, between services, and `front_door`, of the proxy's HTTP and gRPC ports.
    """
    given = {name: one for name, one in certificates.items() if one is not None}
    if not given:
        return
    gauge = Gauge(
        "triptych_certificate_expiry_seconds",
        "when the certificate in use expires, in seconds since 1970",
        ["certificate"],
        registry=registry,
    )
    for name, one in given.items():
        gauge.labels(name).set_function(one.not_after)
