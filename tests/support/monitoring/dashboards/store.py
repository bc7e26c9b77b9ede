"""The dashboard of the EC store: the server, its use, transfers."""

from __future__ import annotations

from support.monitoring.grafana import Dashboard, Panel, q, quantiles

_SERVER = (
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

_USE = (
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

_TRANSFERS = (
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

STORE = Dashboard(
    "store", "Triptych / store", (("Server", _SERVER), ("Use", _USE), ("Transfers", _TRANSFERS))
)
