"""The dashboard of a whole cluster: requests, workers, processes."""

from __future__ import annotations

from support.monitoring.grafana import Dashboard, Panel, q, quantiles

_AT_A_GLANCE = (
    Panel(
        "Requests",
        "reqps",
        (q("sum(rate(triptych_requests_total{NS}[$__rate_interval]))", "requests"),),
        "Requests that end in a second, refused ones too.",
        stat=True,
        width=4,
    ),
    Panel(
        "Answered",
        "percentunit",
        (
            q(
                'sum(rate(triptych_requests_total{NS,status="200"}[$__rate_interval]))'
                ' / (sum(rate(triptych_requests_total{NS,status=~"200|429|5.."}[$__rate_interval])) > 0)',
                "answered",
            ),
        ),
        "Share with status 200 of the requests that were no client's mistake.",
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

_REQUESTS = (
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
        "store: no encoding; pd: in a PD worker's KV cache; joined: another's job; encoded: its own job.",
    ),
    Panel(
        "Refused keys",
        "reqps",
        (q("sum by (reason) (rate(triptych_refusals_total{NS}[$__rate_interval]))", "{{reason}}"),),
        "Wrong API keys, and limits of single keys.",
        quiet=True,
    ),
)

_PROCESSES = (
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
                "rate(process_cpu_seconds_total{NS}[$__rate_interval]) and on (pod) triptych_build_info{NS}",
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
            q('sum(triptych_quota_used{NS,quota="bodies"})', "bodies"),
            q('sum(triptych_quota_capacity{NS,quota="bodies"})', "limit of bodies"),
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

OVERVIEW = Dashboard(
    "overview",
    "Triptych / overview",
    (("At a glance", _AT_A_GLANCE), ("Requests", _REQUESTS), ("Workers and processes", _PROCESSES)),
)
