"""The table of docs/limits.md: every quota of a proxy, as it is without flags."""

from __future__ import annotations

from collections.abc import Iterable

from triptych.base.config import format_size
from triptych.proxy.quotas.quota import QuotaSpec

#: Files that the proxy of the table may open.
FILES = 65536
_HEAD = (
    "| quota | of | capacity | one may have | a claim waits | without progress | in total | above it |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)


def table(specs: Iterable[QuotaSpec]) -> str:
    """The quotas as a Markdown table."""
    return "\n".join([*_HEAD, *(_row(spec) for spec in specs)]) + "\n"


def _row(spec: QuotaSpec) -> str:
    size = format_size(spec.capacity) if spec.unit == "bytes" else f"{spec.capacity} {spec.unit}"
    capacity = f"`{spec.flag}`: {size}" if spec.flag else size
    share = max(int(spec.capacity * spec.share), spec.largest)
    one = format_size(share) if spec.unit == "bytes" else str(share)
    waits = (_seconds(seconds) for seconds in (spec.wait_seconds, spec.idle_seconds, spec.total_seconds))
    return f"| `{spec.name}` | {spec.per} | {capacity} | {one} | {' | '.join(waits)} | {spec.above} |"


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds else "-"
