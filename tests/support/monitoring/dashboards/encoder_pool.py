"""The dashboard of the encoder workers: towers, what they hold, scaling."""

from __future__ import annotations

from support.monitoring.grafana import Dashboard, Panel, mean, q, quantiles

_TOWERS = (
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

_HELD = (
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

_SCALING = (
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

ENCODER_POOL = Dashboard(
    "encoder-pool",
    "Triptych / encoder pool",
    (("Towers", _TOWERS), ("Held", _HELD), ("Scaling", _SCALING)),
)
