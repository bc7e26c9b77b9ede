"""A view of a cluster that is always the committed example, and counts what is asked of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from triptych.base.config import ProxyConfig
from triptych.proxy.live.calls import CallRecord
from triptych.proxy.live.objects import ClusterHistory, ClusterSnapshot, RequestRow
from triptych.proxy.live.timeline import RequestTimeline
from triptych.proxy.quotas.quota import Quota
from triptych.proxy.quotas.table import quota_specs

_FILE = Path(__file__).parents[2] / "unit" / "proxy" / "live" / "example_cluster.json"
EXAMPLE = json.loads(_FILE.read_text())


def places(**changes: Any) -> Quota:
    """The quota of listeners."""
    (spec,) = (spec for spec in quota_specs(ProxyConfig()) if spec.name == "listeners")
    return Quota(replace(spec, **changes))


class CountingView:
    """`uptime` counts the snapshots."""

    def __init__(self) -> None:
        self.looks = self.snapshots = self.histories = 0

    def poll(self) -> None:
        self.looks += 1

    def snapshot(self) -> ClusterSnapshot:
        self.snapshots += 1
        return msgspec.convert(EXAMPLE["snapshot"] | {"uptime": float(self.snapshots)}, ClusterSnapshot)

    def requests(self, tenant: str, /) -> list[RequestRow]:
        return []

    def history(self) -> ClusterHistory:
        self.histories += 1
        return msgspec.convert(EXAMPLE["history"], ClusterHistory)


def call_record(started: float, ended: float | None, timeline: RequestTimeline, **changes: Any) -> CallRecord:
    """The record of a call of one choice."""
    fields = {"label": "mine", "tenant": "", "model": "model", "started_at": 0.0, "choices": 1}
    fields |= {"prompt_tokens": 7, "completion_tokens": 3, "status": None if ended is None else 200}
    return CallRecord(started=started, ended=ended, timeline=timeline, **{**fields, **changes})
