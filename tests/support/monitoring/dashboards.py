"""The four dashboards of the chart."""

from __future__ import annotations

from support.monitoring.grafana import Dashboard, Panel, mean, q, quantiles

_PER_STEP = "of one step, on average"


def _overview() -> Dashboard:
    at_a_glance = (
        Panel(
            "Requests",
            "reqps",
            (q("sum(rate(triptych_requests_total{NS}[$__rate_interval]))", "requests"),),
            "Requests that end in a second, with those refused at admission.",
            stat=True,
            width=4,
        ),
        Panel(
            "Answered",
            "percentunit",
            (
                q(
                    'sum(rate(triptych_requests_total{NS,status="200"}[$__rate_interval]))'
                    " / (sum(rate(triptych_requests_total{NS}[$__rate_interval])) > 0)",
                    "answered",
                ),
            ),
            "Share of the requests that ended with status 200.",
            stat=True,
            width=4,
        ),
        Panel(
            "TTFT p95",
            "s",
            quantiles("triptych_time_to_first_token_seconds", "NS")[1:2],
            "From the request's first byte to its first token.",
            stat=True,
            width=4,
        ),
        Panel(
            "Encoder workers",
            "none",
            (q('max(triptych_workers{NS,pool="encoder"})', "live"),),
            "Those that take new work.",
            stat=True,
            width=4,
        ),
        Panel(
            "PD workers",
            "none",
            (q('max(triptych_workers{NS,pool="pd"})', "live"),),
            "Those that take new work.",
            stat=True,
            width=4,
        ),
        Panel(
            "Store",
            "none",
            (q("min(triptych_store_up{NS})", "up"),),
            "1 while the store answers every proxy.",
            stat=True,
            width=4,
        ),
    )
    requests = (
        Panel(
            "Requests by status",
            "reqps",
            (q("sum by (status) (rate(triptych_requests_total{NS}[$__rate_interval]))", "{{status}}"),),
            "429 and 503 ask the client to come back; 499: the client has gone.",
        ),
        Panel(
            "Time to first token",
            "s",
            quantiles("triptych_time_to_first_token_seconds", "NS"),
            "From the request's first byte to its first token, of requests that got one.",
        ),
        Panel("Request time", "s", quantiles("triptych_request_seconds", "NS"), "From first byte to end."),
        Panel(
            "Requests in flight",
            "none",
            (
                q("sum by (pod) (triptych_requests_in_flight{NS})", "{{pod}}"),
                q("min(triptych_requests_in_flight_limit{NS})", "limit of one proxy"),
            ),
            "From the limit on new requests get 429 (--max-queue).",
        ),
        Panel(
            "Items",
            "ops",
            (q("sum by (result) (rate(triptych_items_total{NS}[$__rate_interval]))", "{{result}}"),),
            "store: no encoding; joined: another request's job; encoded: a job of its own.",
        ),
        Panel(
            "Refused keys",
            "reqps",
            (q("sum by (reason) (rate(triptych_refusals_total{NS}[$__rate_interval]))", "{{reason}}"),),
            "Wrong API keys, and limits of single keys.",
            quiet=True,
        ),
    )
    return Dashboard(
        "overview",
        "Triptych / overview",
        (("At a glance", at_a_glance), ("Requests", requests), ("Workers and processes", _processes())),
    )


def _processes() -> tuple[Panel, ...]:
    return (
        Panel(
            "Workers",
            "none",
            (
                q("max by (pool) (triptych_workers{NS})", "{{pool}}"),
                q("max by (pool) (triptych_workers_stalled{NS})", "{{pool}}, stalled"),
            ),
            "Workers that take new work, and those whose engine stands still.",
        ),
        Panel(
            "Lost and replaced workers",
            "none",
            (
                q("max by (pool) (increase(triptych_worker_losses_total{NS}[10m]))", "{{pool}}, lost"),
                q("max by (pool) (increase(triptych_worker_restarts_total{NS}[10m]))", "{{pool}}, replaced"),
            ),
            "Within ten minutes, without those that have drained.",
        ),
        Panel(
            "Resumed requests",
            "ops",
            (q("sum by (reason) (rate(triptych_resumes_total{NS}[$__rate_interval]))", "{{reason}}"),),
            "Requests taken up by another attempt: their PD worker was lost, drained or full.",
            quiet=True,
        ),
        Panel(
            "Memory",
            "bytes",
            (q("process_resident_memory_bytes{NS} and on (pod) triptych_build_info{NS}", "{{pod}}"),),
            "Resident memory of each process.",
        ),
        Panel(
            "CPU",
            "none",
            (
                q(
                    "rate(process_cpu_seconds_total{NS}[$__rate_interval])"
                    " and on (pod) triptych_build_info{NS}",
                    "{{pod}}",
                ),
            ),
            "Cores that each process uses.",
        ),
        Panel(
            "Media and bodies held",
            "bytes",
            (
                q("sum by (place) (triptych_media_bytes{NS})", "media, {{place}}"),
                q("sum(triptych_body_bytes{NS})", "bodies"),
                q("sum(triptych_body_limit_bytes{NS})", "limit of bodies"),
            ),
            "What proxies hold of requests in flight (--media-memory, --media-disk, --body-memory).",
        ),
        Panel(
            "Fetched media",
            "ops",
            (q("sum by (result) (rate(triptych_media_fetches_total{NS}[$__rate_interval]))", "{{result}}"),),
            "Pictures that requests name by URL.",
            quiet=True,
        ),
        Panel(
            "Poison",
            "none",
            (q("sum by (kind) (increase(triptych_poison_total{NS}[1h]))", "{{kind}}"),),
            "Requests and items given up within an hour because workers have ended at them.",
            quiet=True,
        ),
        Panel(
            "Certificates expire",
            "dateTimeFromNow",
            (
                q(
                    "min by (certificate) (triptych_certificate_expiry_seconds{NS}) * 1000",
                    "{{certificate}}",
                ),
            ),
            "The next certificate to expire, of any process.",
            quiet=True,
        ),
    )


def _encoders() -> Dashboard:
    tower = (
        Panel(
            "Items waiting and in the tower",
            "none",
            (
                q("sum(triptych_encoder_queue_items{M})", "waiting for the tower"),
                q("sum(triptych_encoder_planned_items{M})", "planned, not run"),
                q("sum(triptych_encoder_inflight{M})", "in the tower or being saved"),
                q("sum(triptych_waiting_items{NS})", "waiting at proxies"),
            ),
            "Items queue at proxies while encoders have no credit left or PD workers no room.",
        ),
        Panel(
            "Tower time",
            "percentunit",
            (q("sum by (pod) (rate(triptych_encode_seconds_sum{M}[$__rate_interval]))", "{{pod}}"),),
            "Share of the time in which each tower has a batch. Near 1: the pool is the bottleneck.",
        ),
        Panel(
            "Items encoded",
            "ops",
            (
                q("sum by (pod) (rate(triptych_encoder_tower_items_total{M}[$__rate_interval]))", "{{pod}}"),
                q("sum(rate(triptych_encoder_already_stored_total{M}[$__rate_interval]))", "in the store"),
            ),
            "Items through each tower, and jobs answered from the store.",
        ),
        Panel(
            "Items in a batch",
            "none",
            (mean("triptych_encoder_batch_items", "M", "items"),),
            "The average batch.",
        ),
        Panel("Batch time", "s", quantiles("triptych_encode_seconds", "M"), "One batch in the tower."),
        Panel(
            "Failed jobs",
            "ops",
            (q("sum by (code) (rate(triptych_encoder_failures_total{M}[$__rate_interval]))", "{{code}}"),),
            "Jobs that ended with an error, by its code.",
            quiet=True,
        ),
    )
    held = (
        Panel(
            "Open jobs and leases",
            "none",
            (
                q("sum(triptych_encoder_jobs{M})", "jobs"),
                q("sum(triptych_encoder_leases_held{M})", "leases"),
            ),
            "Jobs from their preprocessing to their end; leases of items in towers.",
        ),
        Panel(
            "Preprocessed pixels",
            "bytes",
            (q("sum by (pod) (triptych_encoder_prepared_bytes{M})", "{{pod}}"),),
            "Bytes that wait for the tower.",
        ),
        Panel(
            "Jobs sent",
            "ops",
            (q("sum by (kind) (rate(triptych_encoder_jobs_total{NS}[$__rate_interval]))", "{{kind}}"),),
            "re_encode: the embedding was lost before it was loaded.",
        ),
    )
    return Dashboard(
        "encoder-pool",
        "Triptych / encoder pool",
        (("Towers", tower), ("Held", held), ("Scaling", _scaling())),
    )


def _scaling() -> tuple[Panel, ...]:
    return (
        Panel(
            "Work",
            "s",
            (
                q("max(triptych_encoder_backlog_seconds{NS})", "outstanding"),
                q(
                    "max by (average) (triptych_encoder_arrival_seconds{NS})",
                    "arriving in a second, {{average}}",
                ),
            ),
            "Seconds of one worker: outstanding now, and arriving in each second.",
            quiet=True,
        ),
        Panel(
            "Workers, live and wanted",
            "none",
            (
                q('max(triptych_workers{NS,pool="encoder"})', "live"),
                q("max(triptych_encoder_workers_desired{NS})", "wanted"),
                q('max(triptych_workers_limit{NS,pool="encoder"})', "most"),
            ),
            "A pool that is not scaled has no wanted number.",
            quiet=True,
        ),
        Panel(
            "Cost of an item",
            "s",
            (q("max by (kind) (triptych_encode_cost_seconds{NS})", "{{kind}}"),),
            "Tower time of an average item, by kind of worker, as proxies have learnt it.",
        ),
        Panel(
            "Decisions",
            "none",
            (
                q(
                    "sum by (pool, reason) (increase(triptych_scale_decisions_total{NS}[10m]))",
                    "{{pool}}, {{reason}}",
                ),
            ),
            "Decisions for another number of workers within ten minutes.",
            quiet=True,
        ),
        Panel(
            "Cold start",
            "s",
            (q("max by (pool, kind) (triptych_cold_start_seconds{NS})", "{{pool}}, {{kind}}"),),
            "From a decision for a worker to its registration.",
            quiet=True,
        ),
        Panel(
            "Encoders that no PD worker takes",
            "none",
            (q("max by (reason) (triptych_mismatched_encoders{NS})", "{{reason}}"),),
            "Another checkpoint or row width than the PD workers have.",
        ),
    )


def _pd() -> Dashboard:
    requests = (
        Panel(
            "Requests",
            "none",
            (
                q("sum(vllm:num_requests_running{M})", "running"),
                q("sum(vllm:num_requests_waiting{M})", "waiting"),
            ),
            "In the running batch; waiting for room or embeddings.",
        ),
        Panel(
            "Tokens",
            "none",
            (
                q("sum(rate(vllm:prompt_tokens_total{M}[$__rate_interval]))", "prompt, in a second"),
                q("sum(rate(vllm:generation_tokens_total{M}[$__rate_interval]))", "generated, in a second"),
            ),
            "Tokens in a second of all PD workers.",
        ),
        Panel(
            "Finished requests",
            "ops",
            (
                q(
                    "sum by (finished_reason) (rate(vllm:request_success_total{M}[$__rate_interval]))",
                    "{{finished_reason}}",
                ),
            ),
            "By the reason of their end.",
        ),
        Panel(
            "Time to first token at the worker",
            "s",
            quantiles("vllm:time_to_first_token_seconds", "M"),
            "From the request's arrival at the PD worker.",
        ),
        Panel(
            "Between two tokens",
            "s",
            quantiles("vllm:inter_token_latency_seconds", "M"),
            "Gap between two tokens of a request.",
        ),
        Panel(
            "Where the time goes",
            "s",
            (
                mean("vllm:request_queue_time_seconds", "M", "queue"),
                mean("vllm:request_prefill_time_seconds", "M", "prefill"),
                mean("vllm:request_decode_time_seconds", "M", "decode"),
            ),
            "Of an average request: until its first chunk, its first token, its last token.",
        ),
    )
    steps = (
        Panel(
            "Tokens of a step",
            "none",
            (mean("vllm:iteration_tokens_total", "M", "tokens"),),
            f"Tokens {_PER_STEP}.",
        ),
        Panel(
            "Requests of a step",
            "none",
            (mean("triptych_pd_batch_requests", "M", "requests"),),
            f"Requests {_PER_STEP}.",
        ),
        Panel(
            "Chunks and preemptions",
            "ops",
            (
                q("sum(rate(triptych_pd_chunked_prefills_total{M}[$__rate_interval]))", "chunks"),
                q("sum(rate(vllm:num_preemptions_total{M}[$__rate_interval]))", "preemptions"),
                q("sum(rate(triptych_pd_swapped_blocks_total{M}[$__rate_interval]))", "blocks swapped out"),
            ),
            "Prefill chunks that did not end a prompt; requests whose blocks were taken.",
        ),
    )
    return Dashboard(
        "pd",
        "Triptych / PD workers",
        (("Requests", requests), ("Steps", steps), ("Memory", _pd_memory())),
    )


def _pd_memory() -> tuple[Panel, ...]:
    return (
        Panel(
            "KV cache in use",
            "percentunit",
            (q("max by (pod) (vllm:kv_cache_usage_perc{M})", "{{pod}}"),),
            "Share of the KV blocks that requests hold.",
        ),
        Panel(
            "Prefix cache hits",
            "percentunit",
            (
                q(
                    "sum(rate(vllm:prefix_cache_hits_total{M}[$__rate_interval]))"
                    " / (sum(rate(vllm:prefix_cache_queries_total{M}[$__rate_interval])) > 0)",
                    "hits",
                ),
            ),
            "Share of prompt tokens found in the prefix cache.",
        ),
        Panel(
            "Encoder cache",
            "bytes",
            (
                q("sum by (pod) (triptych_pd_encoder_cache_bytes{M})", "{{pod}}, resident"),
                q("sum by (pod) (triptych_pd_reserved_bytes{M})", "{{pod}}, reserved"),
            ),
            "Resident embeddings; bytes reserved for the items of admitted requests.",
        ),
        Panel(
            "KV blocks",
            "none",
            (
                q("sum(triptych_pd_kv_blocks_used{M})", "on the device"),
                q("sum(triptych_pd_host_blocks_used{M})", "swapped out"),
            ),
            "Blocks that requests hold.",
        ),
        Panel(
            "References to embeddings",
            "none",
            (
                q("sum(triptych_pd_encoder_cache_references{M})", "references"),
                q("sum(triptych_pd_cross_tables{M})", "cross tables"),
            ),
            "Of requests to resident embeddings, and cross-attention tables that requests share.",
        ),
        Panel(
            "Parameters",
            "bytes",
            (q("sum by (pod) (triptych_parameter_bytes{M})", "{{pod}}"),),
            "Bytes of each worker's weights.",
        ),
    )


def _store() -> Dashboard:
    server = (
        Panel(
            "Answers",
            "none",
            (q("min by (pod) (triptych_store_up{NS})", "{{pod}}"),),
            "1 while the store answers the proxy.",
        ),
        Panel(
            "Memory",
            "bytes",
            (
                q("max(triptych_store_used_bytes{NS})", "used"),
                q("max(triptych_store_max_bytes{NS}) > 0", "maxmemory"),
                q("sum(triptych_published_bytes{NS})", "published, not loaded"),
            ),
            "Near maxmemory keys are evicted; published embeddings wait for a PD worker.",
        ),
        Panel(
            "Evictions",
            "ops",
            (q("max(rate(triptych_store_evictions_total{NS}[$__rate_interval]))", "keys"),),
            "Keys evicted in a second. Harmless while nothing is encoded again.",
        ),
    )
    use = (
        Panel(
            "Look-ups by PD workers",
            "ops",
            (q("sum by (result) (rate(triptych_ec_lookups_total{M}[$__rate_interval]))", "{{result}}"),),
            "resident: in the encoder cache; fetched: from the store; missing: encoded again.",
        ),
        Panel(
            "Items encoded again",
            "percentunit",
            (
                q(
                    "sum(rate(triptych_re_encodes_total{NS}[$__rate_interval]))"
                    " / (sum(rate(triptych_items_total{NS}[$__rate_interval])) > 0)",
                    "share of items",
                ),
            ),
            "Embeddings lost before they were loaded. Above 0.1 the store is too small or too slow.",
        ),
        Panel(
            "Items found in the store",
            "percentunit",
            (
                q(
                    'sum(rate(triptych_items_total{NS,result="store"}[$__rate_interval]))'
                    " / (sum(rate(triptych_items_total{NS}[$__rate_interval])) > 0)",
                    "share of items",
                ),
            ),
            "Share of requests' items that needed no encoding.",
        ),
    )
    transfers = (
        Panel(
            "Transfers",
            "Bps",
            (
                q("sum(rate(triptych_ec_save_bytes_total{M}[$__rate_interval]))", "saved"),
                q("sum(rate(triptych_ec_load_bytes_total{M}[$__rate_interval]))", "loaded"),
            ),
            "Embeddings to and from the store.",
        ),
        Panel("Save time", "s", quantiles("triptych_ec_save_seconds", "M"), "One embedding to the store."),
        Panel("Load time", "s", quantiles("triptych_ec_load_seconds", "M"), "One embedding from the store."),
    )
    return Dashboard(
        "store", "Triptych / store", (("Server", server), ("Use", use), ("Transfers", transfers))
    )


DASHBOARDS = (_overview(), _encoders(), _pd(), _store())
