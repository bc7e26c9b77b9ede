"""The dashboard of the PD workers: requests, steps, memory."""

from __future__ import annotations

from support.monitoring.grafana import Dashboard, Panel, mean, q, quantiles

_PER_STEP = "of one step, on average"

_REQUESTS = (
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

_STEPS = (
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

_MEMORY = (
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

PD_WORKERS = Dashboard(
    "pd",
    "Triptych / PD workers",
    (("Requests", _REQUESTS), ("Steps", _STEPS), ("Memory", _MEMORY)),
)
