"""The chart's alert rules, and inputs under which each of them fires and does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[3] / "deploy" / "helm" / "triptych" / "files" / "alerts.yaml"


def rules() -> list[dict[str, Any]]:
    """All rules, of records and of alerts."""
    groups: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alert_rules() -> dict[str, dict[str, Any]]:
    """The alerts by name."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


@dataclass(frozen=True, slots=True)
class AlertCase:
    """Series in promtool's notation, one point a minute, at which an alert fires.

    `quiet` are changed series, each of which keeps it from firing. `labels`: those of the alert besides
    severity and namespace.
    """

    alert: str
    series: Mapping[str, str]
    quiet: tuple[Mapping[str, str], ...]
    minutes: int = 60
    labels: Mapping[str, str] = field(default_factory=dict)
    #: False for an alert about what is missing everywhere.
    in_namespace: bool = True


_OK = 'triptych_requests_total{status="200"}'
_NOT_SERVED = 'triptych_requests_total{status="404",route="other"}'
_FAST = 'triptych_time_to_first_token_seconds_bucket{le="5.0"}'


CASES = (
    AlertCase(
        "TriptychTTFTBurnsFast",
        {_OK: "0+100x400", _FAST: "0+80x400"},
        (
            {_FAST: "0+90x400"},
            {_OK: "0x400"},
            {_FAST: "0+80x110 8900+100x10"},  # it is over
            {_FAST: "0+100x115 11520+20x5"},  # it has just begun
        ),
        minutes=120,
    ),
    AlertCase(
        "TriptychTTFTBurnsSlowly",
        {_OK: "0+100x500", _FAST: "0+92x500"},
        ({_FAST: "0+95x500"}, {_FAST: "0+92x440 40480+100x60"}),
        minutes=480,
    ),
    AlertCase(
        "TriptychErrors",
        # Clients that ask for what is not served hide no errors.
        {_OK: "0+98x60", _NOT_SERVED: "0+900x60", 'triptych_requests_total{status="500"}': "0+2x60"},
        (
            {'triptych_requests_total{status="500"}': "0+0.5x60"},
            {'triptych_requests_total{status="500"}': "0+2x54 108+0x6"},
        ),
    ),
    AlertCase(
        "TriptychRefusesRequests",
        {_OK: "0+90x60", _NOT_SERVED: "0+900x60", 'triptych_requests_total{status="429"}': "0+10x60"},
        ({'triptych_requests_total{status="429"}': "0+4x60"},),
    ),
    AlertCase(
        "TriptychQueueNearLimit",
        {"triptych_requests_in_flight": "210x60", "triptych_requests_in_flight_limit": "256x60"},
        ({"triptych_requests_in_flight": "200x60"}, {"triptych_requests_in_flight": "10x57 250x3"}),
        labels={"pod": "p"},
    ),
    AlertCase(
        "TriptychNoProxy",
        {"triptych_store_up": "1x30 stale"},
        ({"triptych_store_up": "0x60"},),
        in_namespace=False,
    ),
    AlertCase(
        "TriptychNoEncoders",
        {'triptych_workers{pool="encoder"}': "0x60", "triptych_waiting_items": "3x60"},
        ({"triptych_waiting_items": "0x60"}, {'triptych_workers{pool="encoder"}': "0x58 1x2"}),
    ),
    AlertCase(
        "TriptychNoPDWorkers",
        {'triptych_workers{pool="pd"}': "0x60"},
        ({'triptych_workers{pool="pd"}': "1x60"}, {'triptych_workers{pool="pd"}': "1x59 0x1"}),
    ),
    AlertCase(
        "TriptychWorkersLost",
        {
            'triptych_worker_losses_total{pool="pd"}': "0x50 1 2x10",
            'triptych_worker_restarts_total{pool="pd"}': "0x50 1 2x10",
        },
        ({'triptych_worker_restarts_total{pool="pd"}': "0x60"},),
        labels={"pool": "pd"},
    ),
    AlertCase(
        "TriptychWorkerStalled",
        {'triptych_workers_stalled{pool="encoder"}': "0x50 1x10"},
        ({'triptych_workers_stalled{pool="encoder"}': "1x50 0x10"},),
        labels={"pool": "encoder"},
    ),
    AlertCase(
        "TriptychMismatchedEncoders",
        {'triptych_mismatched_encoders{reason="row_width"}': "2x60"},
        ({'triptych_mismatched_encoders{reason="row_width"}': "0x50 2x10"},),
        labels={"reason": "row_width"},
    ),
    AlertCase(
        "TriptychPoison",
        {'triptych_poison_total{kind="request"}': "0x50 1x10"},
        ({'triptych_poison_total{kind="request"}': "1x60"},),
        labels={"kind": "request"},
    ),
    AlertCase(
        "TriptychEncodersAtLimit",
        {"triptych_encoder_workers_desired": "4x60", 'triptych_workers_limit{pool="encoder"}': "4x60"},
        (
            {"triptych_encoder_workers_desired": "3x60"},
            {"triptych_encoder_workers_desired": "4x40 3x10 4x10"},
        ),
    ),
    AlertCase(
        "TriptychPDWorkersAtLimit",
        {"triptych_pd_workers_desired": "3x60", 'triptych_workers_limit{pool="pd"}': "3x60"},
        ({'triptych_workers_limit{pool="pd"}': "4x60"},),
    ),
    AlertCase(
        "TriptychStoreDown",
        {"triptych_store_up": "1x50 0x10"},
        ({"triptych_store_up": "1x60"}, {"triptych_store_up": "0x50 1x10"}),
    ),
    AlertCase(
        "TriptychStoreTooSmall",
        {
            "triptych_store_used_bytes": "95x60",
            "triptych_store_max_bytes": "100x60",
            "triptych_re_encodes_total": "0+2x60",
            'triptych_items_total{result="encoded"}': "0+10x60",
        },
        (
            {"triptych_store_used_bytes": "80x60"},
            {"triptych_re_encodes_total": "0+0.5x60"},
            {"triptych_store_max_bytes": "0x60"},
            {'triptych_items_total{result="encoded"}': "0x60"},
        ),
    ),
    AlertCase(
        "TriptychEvictedBeforeLoad",
        {
            'triptych_ec_lookups_total{result="missing"}': "0+1x60",
            'triptych_ec_lookups_total{result="fetched"}': "0+9x60",
            "triptych_store_evictions_total": "0+5x60",
        },
        (
            {"triptych_store_evictions_total": "7x60"},
            {'triptych_ec_lookups_total{result="fetched"}': "0+99x60"},
        ),
    ),
    AlertCase(
        "TriptychCertificateExpires",
        # promtool's clock begins at 0: the certificate ends 13 days after the test.
        {'triptych_certificate_expiry_seconds{certificate="internal"}': "1130400x120"},
        ({'triptych_certificate_expiry_seconds{certificate="internal"}': "1300000x120"},),
        minutes=120,
        labels={"certificate": "internal"},
    ),
)


def promtool_test(case: AlertCase, changed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A unit test of promtool's for one case; with `changed` series the alert must not fire."""
    rule = alert_rules()[case.alert]
    labels = {**rule["labels"], **({"namespace": "n"} if case.in_namespace else {}), **case.labels}
    annotations = dict(rule["annotations"])
    for name, value in case.labels.items():
        annotations["summary"] = annotations["summary"].replace(f"{{{{ $labels.{name} }}}}", value)
    fires = [{"exp_labels": labels, "exp_annotations": annotations}] if changed is None else []
    series = {**case.series, **(changed or {})}
    return {
        "interval": "1m",
        "input_series": [{"series": _placed(name), "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{case.minutes}m", "alertname": case.alert, "exp_alerts": fires}],
    }


def _placed(series: str) -> str:
    """The series as a scrape labels it."""
    name, _, labels = series.partition("{")
    return f'{name}{{namespace="n",pod="p"{"," + labels if labels else "}"}'
