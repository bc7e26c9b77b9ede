"""Prometheus metrics of every role: names, labels and buckets.

PD workers use vLLM's names, so that existing dashboards work; everything else is `triptych_*`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

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

M = TypeVar("M", Counter, Gauge, Histogram)
#: Kinds of workers that have a series of their own; a registration may name any kind.
MAX_KINDS = 64
#: The kind of all others.
OTHER_KIND = "other"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_KERNEL = ("part", "kernel", "why")
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def new_registry() -> CollectorRegistry:
    """A registry with the process's own metrics: its version, memory, CPU time, files and start."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("triptych_build", "version of this process", registry=registry).info({"version": __version__})
    return registry


class _Metric(Generic[M]):
    """A metric as a class declares it; each instance has one of its own, by the same name."""

    def __init__(self, kind: Callable[..., M], name: str, text: str, labels: tuple[str, ...]) -> None:
        self._kind: Callable[..., M] = kind
        self._name, self._text, self._labels = name, text, labels

    def __get__(self, instance: object, owner: type) -> M:
        raise AttributeError(f"{self._name} is an instance's")

    def make(self, registry: CollectorRegistry, common: dict[str, str]) -> M:
        """The metric, whose `common` labels are set unless it has further ones."""
        made: M = self._kind(self._name, self._text, (*common, *self._labels), registry=registry)
        return made.labels(*common.values()) if common and not self._labels else made


def _gauge(name: str, text: str, *labels: str) -> _Metric[Gauge]:
    return _Metric(Gauge, name, text, labels)


def _counter(name: str, text: str, *labels: str) -> _Metric[Counter]:
    return _Metric(Counter, name, text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> _Metric[Histogram]:
    return _Metric(partial(Histogram, buckets=buckets), name, text, ())


class _Metrics:
    """The metrics that a subclass declares, all in one registry and with these `common` labels."""

    def __init__(self, registry: CollectorRegistry | None, **common: str) -> None:
        self.registry = registry or new_registry()
        for attribute, declared in vars(type(self)).items():
            if isinstance(declared, _Metric) and attribute not in vars(self):
                vars(self)[attribute] = declared.make(self.registry, common)


class PDMetrics(_Metrics):
    """The metrics of one PD worker, all labelled with `model_name`; those of requests under vLLM's names.

    `parameter_bytes` is the process's gauge where an encoder worker shares process and registry.
    """

    engine_up = _gauge("triptych_pd_engine_up", "1 while vLLM generates, with --engine vllm, else 0")
    engine_losses = _counter("triptych_pd_engine_losses", "times that vLLM has gone, with --engine vllm")
    parameter_bytes = _gauge("triptych_parameter_bytes", "bytes of this process's parameters")

    requests_running = _gauge("vllm:num_requests_running", "requests in the running batch")
    requests_waiting = _gauge("vllm:num_requests_waiting", "requests waiting for room or embeddings")
    kv_cache_usage = _gauge("vllm:kv_cache_usage_perc", "share of KV blocks in use, 0 to 1")
    prompt_tokens = _counter("vllm:prompt_tokens", "prompt tokens prefilled")
    generation_tokens = _counter("vllm:generation_tokens", "tokens generated")
    preemptions = _counter("vllm:num_preemptions", "requests preempted")
    tenant_preemptions = _counter(
        "triptych_pd_tenant_preemptions", "requests preempted for a tenant that had none in the batch"
    )
    room_given_up = _counter(
        "triptych_pd_room_given_up",
        "waiting requests that gave the room of their items up for a tenant that had none",
    )
    tenants_waiting = _gauge(
        "triptych_pd_tenants_waiting", "tenants with requests that wait, and none in the batch"
    )
    prefix_queries = _counter("vllm:prefix_cache_queries", "prompt tokens looked up in the prefix cache")
    prefix_hits = _counter("vllm:prefix_cache_hits", "prompt tokens found in the prefix cache")
    iteration_tokens = _histogram("vllm:iteration_tokens_total", "tokens of one step", buckets=_COUNTS)
    time_to_first_token = _histogram("vllm:time_to_first_token_seconds", "from arrival to first token")
    inter_token_latency = _histogram("vllm:inter_token_latency_seconds", "between two tokens")
    e2e_latency = _histogram("vllm:e2e_request_latency_seconds", "from arrival to the last token")
    queue_time = _histogram("vllm:request_queue_time_seconds", "from arrival to the first chunk")
    prefill_time = _histogram("vllm:request_prefill_time_seconds", "from first chunk to first token")
    decode_time = _histogram("vllm:request_decode_time_seconds", "from first to last token")
    request_success = _counter("vllm:request_success", "finished requests", "finished_reason")

    kernel = _gauge(
        "triptych_pd_kernel", "1: what computes a part of its steps, and why nothing faster does", *_KERNEL
    )
    ranks = _gauge("triptych_pd_ranks", "processes that share the decoder, by --tensor-parallel")
    busy = _gauge("triptych_pd_busy", "share of the last 10 s in which the engine worked on steps, 0 to 1")
    batch_requests = _histogram("triptych_pd_batch_requests", "requests in one step", buckets=_COUNTS)
    chunked_prefills = _counter("triptych_pd_chunked_prefills", "prefill chunks that did not end a prompt")
    overlap_requests = _counter(
        "triptych_pd_overlap_requests", "requests prefilled in part before all of their items were there"
    )
    overlap_tokens = _counter(
        "triptych_pd_overlap_tokens", "prompt tokens prefilled before all items of their request were there"
    )
    overlap_lost_tokens = _counter(
        "triptych_pd_overlap_lost_tokens", "those of them that were evicted before their request started"
    )
    graph_steps = _counter("triptych_pd_graph_steps", "steps replayed as a decode graph")
    limited_steps = _counter(
        "triptych_pd_limited_steps", "steps on fewer CPU threads, since other programs had the cores"
    )

    kv_blocks_used = _gauge("triptych_pd_kv_blocks_used", "KV blocks that requests hold")
    cross_tables = _gauge("triptych_pd_cross_tables", "cross-attention tables that requests share")
    projections = _counter("triptych_pd_projections", "encoder outputs projected into cross tables")
    host_blocks_used = _gauge("triptych_pd_host_blocks_used", "KV blocks swapped out to host memory")
    state_slots_used = _gauge("triptych_pd_state_slots_used", "slots of recurrent states that requests hold")
    state_snapshots = _gauge("triptych_pd_state_snapshots", "recurrent states kept for equal prefixes")
    swapped_blocks = _counter("triptych_pd_swapped_blocks", "KV blocks swapped out")
    encoder_cache_bytes = _gauge("triptych_pd_encoder_cache_bytes", "bytes of resident embeddings")
    encoder_cache_references = _gauge("triptych_pd_encoder_cache_references", "references to embeddings")
    reserved_bytes = _gauge("triptych_pd_reserved_bytes", "bytes reserved for admitted requests' items")

    shared_kv_looked_up = _counter(
        "triptych_pd_shared_kv_looked_up_tokens", "tokens whose KV blocks were looked for in the store"
    )
    shared_kv_loaded = _counter(
        "triptych_pd_shared_kv_loaded_tokens",
        "tokens whose KV blocks came from the store; others are computed",
    )
    shared_kv_saved = _counter(
        "triptych_pd_shared_kv_saved_tokens",
        "prompt tokens whose KV blocks this worker has put into the store",
    )
    shared_kv_dropped = _counter(
        "triptych_pd_shared_kv_dropped_tokens",
        "prompt tokens whose KV blocks were not saved for lack of room",
    )
    shared_kv_loaded_bytes = _counter("triptych_pd_shared_kv_loaded_bytes", "bytes of loaded KV blocks")
    shared_kv_saved_bytes = _counter("triptych_pd_shared_kv_saved_bytes", "bytes of saved KV blocks")
    shared_kv_late = _counter(
        "triptych_pd_shared_kv_late", "requests that went on without all of their blocks: these took too long"
    )
    shared_kv_wait = _histogram("triptych_pd_shared_kv_wait_seconds", "a request's wait for KV blocks")

    kv_transfers = _counter(
        "triptych_pd_kv_transfers",
        "prompts whose KV vLLM has kept for another worker (kept, not_kept, full), or read from one (read, "
        "late, failed)",
        "result",
    )
    ec_load_seconds = _histogram("triptych_ec_load_seconds", "one load of an embedding")
    ec_load_bytes = _counter("triptych_ec_load_bytes", "bytes of loaded embeddings")
    ec_loads = _counter("triptych_ec_loads", "loads by path: shm, peer or store", "path")
    ec_lookups = _counter("triptych_ec_lookups", "items asked for, by where they were found", "result")

    def __init__(
        self,
        model_name: str,
        registry: CollectorRegistry | None = None,
        parameter_bytes: Gauge | None = None,
    ) -> None:
        if parameter_bytes is not None:
            vars(self)["parameter_bytes"] = parameter_bytes
        super().__init__(registry, model_name=model_name)


class EncoderMetrics(_Metrics):
    """The metrics of one encoder worker, all labelled with `model_name`."""

    queue_items = _gauge("triptych_encoder_queue_items", "items waiting for the tower")
    planned_items = _gauge("triptych_encoder_planned_items", "items planned and not yet run")
    inflight = _gauge("triptych_encoder_inflight", "items in the tower or being saved")
    jobs = _gauge("triptych_encoder_jobs", "open jobs")
    busy = _gauge("triptych_encoder_busy", "share of the last 10 s in which the tower worked, 0 to 1")
    tower_items = _counter("triptych_encoder_tower_items", "items that the tower has encoded")
    tower_calls = _counter("triptych_encoder_tower_calls", "batches that the tower has run")
    already_stored = _counter("triptych_encoder_already_stored", "jobs answered from the store")
    batch_items = _histogram("triptych_encoder_batch_items", "items of one batch", buckets=_COUNTS)
    encode_seconds = _histogram("triptych_encode_seconds", "one batch in the tower")
    save_seconds = _histogram("triptych_ec_save_seconds", "one save to the store")
    save_bytes = _counter("triptych_ec_save_bytes", "bytes saved to the store")
    leases_held = _gauge("triptych_encoder_leases_held", "leases of items in the tower")
    prepared_bytes = _gauge("triptych_encoder_prepared_bytes", "bytes of preprocessed pixels")
    decodes = _gauge("triptych_encoder_decodes", "decodes under way, in threads or processes", "place")
    decode_seconds = _counter(
        "triptych_encoder_decode_seconds", "time for which decodes had their places", "place"
    )
    decodes_abandoned = _counter(
        "triptych_encoder_decodes_abandoned", "decodes ended since nobody waited for them any more"
    )
    decoded_bytes = _gauge(
        "triptych_encoder_decoded_bytes", "bytes of decoded media that are not preprocessed yet"
    )
    failures = _counter("triptych_encoder_failures", "jobs that failed", "code")
    parameter_bytes = _gauge("triptych_parameter_bytes", "bytes of this process's parameters")

    graph_hits = _counter("triptych_encoder_graph_hits", "items encoded by replays of captured tower calls")
    graph_misses = _counter(
        "triptych_encoder_graph_misses", "items larger than any captured tower call, encoded eagerly"
    )
    graph_padding_rows = _counter("triptych_encoder_graph_padding_rows", "rows of replays that no item had")
    graph_buffer_bytes = _gauge(
        "triptych_encoder_graph_buffer_bytes", "bytes of the buffers of captured tower calls"
    )
    graph_replays = _counter(
        "triptych_encoder_graph_replays", "replays of captured tower calls, by their rows", "token_budget"
    )

    ranks = _gauge("triptych_encoder_ranks", "ranks that share the tower's batches")
    rank_items = _counter("triptych_encoder_rank_items", "items given to one rank", "rank")
    rank_patches = _counter("triptych_encoder_rank_patches", "patches given to one rank", "rank")
    rank_failures = _counter("triptych_encoder_rank_failures", "shares that a rank failed on", "rank")

    def __init__(self, model_name: str, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry, model_name=model_name)
        self.ranks.set(1)


class ProxyMetrics(_Metrics):
    """The metrics of one proxy."""

    requests = _counter("triptych_requests", "requests ended, refused ones too", "status", "route")
    adapter_requests = _counter(
        "triptych_adapter_requests", "calls ended that named a LoRA adapter", "model", "adapter", "status"
    )
    refusals = _counter("triptych_refusals", "requests refused for their API key", "reason")
    in_flight = _gauge("triptych_requests_in_flight", "requests that have not ended")
    in_flight_limit = _gauge(
        "triptych_requests_in_flight_limit", "requests in flight from which on new ones get 429"
    )
    quota_used = _gauge("triptych_quota_used", "what is held of a quota", "quota")
    quota_capacity = _gauge("triptych_quota_capacity", "what may be held of a quota", "quota")
    poison = _counter("triptych_poison", "requests and items given up: workers have ended at them", "kind")
    encoder_jobs = _counter("triptych_encoder_jobs", "encoder jobs sent", "kind")
    items = _counter("triptych_items", "items of requests, by where they were found", "result")
    skipped_jobs = _counter(
        "triptych_skipped_jobs",
        "encoder jobs put off for items that a PD worker was expected to hold; missing: made after all",
        "result",
    )
    resumes = _counter("triptych_resumes", "requests taken up by another attempt", "reason")
    hand_overs = _counter(
        "triptych_hand_overs", "requests that prefill workers have offered to decode workers", "result"
    )
    re_encodes = _counter("triptych_re_encodes", "items encoded again for admitted requests")
    published_bytes = _gauge("triptych_published_bytes", "bytes published in the store and not yet loaded")
    waiting_items = _gauge("triptych_waiting_items", "items and first requests that wait for an encoder")
    time_to_first_token = _histogram(
        "triptych_time_to_first_token_seconds",
        "of answered requests: from the first byte to the first token, the vector or the score",
    )
    duration = _histogram("triptych_request_seconds", "from the request's first byte to its end")

    workers = _gauge("triptych_workers", "live workers", "pool")
    workers_stalled = _gauge(
        "triptych_workers_stalled", "registered workers whose engine stands still", "pool"
    )
    target_workers = _gauge(
        "triptych_target_workers_desired",
        "workers that there should be of what is scaled by itself",
        *("pool", "model", "kind", "role"),
    )
    workers_limit = _gauge("triptych_workers_limit", "most workers of a scaled pool", "pool")
    worker_losses = _counter(
        "triptych_worker_losses", "registered workers that have stopped answering", "pool"
    )
    worker_restarts = _counter(
        "triptych_worker_restarts", "workers that another process has replaced at its address", "pool"
    )
    mismatched_encoders = _gauge(
        "triptych_mismatched_encoders", "encoders whose embeddings no PD worker takes", "reason"
    )

    store_up = _gauge("triptych_store_up", "1 while the store answers, else 0")
    store_used_bytes = _gauge("triptych_store_used_bytes", "memory that the store uses")
    store_max_bytes = _gauge("triptych_store_max_bytes", "the store's maxmemory; 0: no limit")
    store_evictions = _counter("triptych_store_evictions", "keys that the store has evicted")
    media_bytes = _gauge("triptych_media_bytes", "media of requests in flight", "place")
    media_fetches = _counter("triptych_media_fetches", "media fetched by URL, by outcome", "result")
    media_fetched_bytes = _counter("triptych_media_fetched_bytes", "bytes of media fetched by URL")
    media_fetch_seconds = _histogram(
        "triptych_media_fetch_seconds", "one fetch with its redirects and retries"
    )

    encode_cost = _gauge("triptych_encode_cost_seconds", "tower time of an average item", "kind", "model")
    encoder_backlog = _gauge("triptych_encoder_backlog_seconds", "outstanding encoder work of all proxies")
    encoder_arrivals = _gauge(
        "triptych_encoder_arrival_seconds", "encoder work that arrives in a second, all proxies", "average"
    )
    scale_decisions = _counter(
        "triptych_scale_decisions", "decisions for another number of workers", "pool", "reason"
    )
    cold_start = _gauge(
        "triptych_cold_start_seconds", "from a decision for a worker to its registration", "pool", "kind"
    )

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        self._kinds: set[str] = set()
        #: By pool; a pool that is not scaled has none.
        self.workers_desired: dict[str, Gauge] = {}
        # From 0 on: the first increase of a series that comes with it is not seen.
        for kind in ("request", "item"):
            self.poison.labels(kind)

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
