"""Every metric of every process, read from the registries that the processes make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from triptych.base.metrics import EncoderMetrics, PDMetrics, ProxyMetrics, show_expiry

#: Units by the end of a name, longest first.
_UNITS = (
    ("_perc", "share, 0 to 1"),
    ("_cpu_seconds_total", "s"),
    ("_expiry_seconds", "s since 1970"),
    ("_start_time_seconds", "s since 1970"),
    ("_seconds", "s"),
    ("_bytes", "B"),
    ("_bytes_total", "B"),
    ("_fds", "files"),
    ("_tokens", "tokens"),
    ("_tokens_total", "tokens"),
)


@dataclass(frozen=True, slots=True)
class DocumentedMetric:
    """One metric, by the name that queries use; `_bucket`, `_sum`, `_count` follow that of a histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def unit(self) -> str:
        """What its numbers count."""
        found = (unit for end, unit in _UNITS if self.name.endswith(end))
        return next(found, "-" if self.kind == "info" else "number")

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series."""
        ends = ("_bucket", "_sum", "_count") if self.kind == "histogram" else ("",)
        return tuple(self.name + end for end in ends)


class _Expiring:
    """Certificates in use."""

    def not_after(self) -> float:
        return 0.0


def registries() -> dict[str, CollectorRegistry]:
    """The registry of each kind of process, as it is once pools are scaled and certificates are in use."""
    proxy = ProxyMetrics()
    for pool in ("encoder", "pd"):
        proxy.show_desired(pool, 1)
    found = {"encoder": EncoderMetrics("m").registry, "PD": PDMetrics("m").registry, "proxy": proxy.registry}
    for registry in found.values():
        show_expiry(registry, internal=_Expiring())
    return found


def metrics_of(registry: CollectorRegistry) -> Iterator[DocumentedMetric]:
    """The metrics of one registry, in the order of their declaration."""
    for collector in list(registry._collector_to_names):
        if isinstance(collector, MetricWrapperBase):
            yield _documented(collector)
        else:
            for family in collector.collect():
                name = family.name + ("_total" if family.type == "counter" else "")
                yield DocumentedMetric(name, family.type, (), _sentence(family.documentation))


def _documented(metric: Any) -> DocumentedMetric:
    ends = {"counter": "_total", "info": "_info"}
    labels = metric._labelnames or (("version",) if metric._type == "info" else ())
    name = metric._name + ends.get(metric._type, "")
    return DocumentedMetric(name, metric._type, tuple(labels), _sentence(metric._documentation))


def _sentence(text: str) -> str:
    return text.strip().rstrip(".")


def documented() -> dict[DocumentedMetric, list[str]]:
    """Every metric with the processes that have it."""
    found: dict[DocumentedMetric, list[str]] = {}
    for process, registry in registries().items():
        for metric in metrics_of(registry):
            found.setdefault(metric, []).append(process)
    return found


def table() -> str:
    """The table of docs/metrics.md."""
    rows = ["| name | type | labels | unit | process | meaning |", "| --- | --- | --- | --- | --- | --- |"]
    for metric, processes in sorted(documented().items(), key=lambda row: (row[1][-1], row[0].name)):
        where = "all" if len(processes) == 3 else ", ".join(processes)
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        rows.append(
            f"| `{metric.name}` | {metric.kind} | {labels} | {metric.unit} | {where} | {metric.meaning} |"
        )
    return "\n".join(rows)
