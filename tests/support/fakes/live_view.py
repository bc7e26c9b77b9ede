"""A view of a cluster that is always the committed example, and counts what is asked of it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from triptych.proxy.live.objects import ClusterHistory, ClusterSnapshot, RequestRow

_FILE = Path(__file__).parents[2] / "unit" / "proxy" / "live" / "example_cluster.json"
EXAMPLE = json.loads(_FILE.read_text())


class CountingView:
    """`uptime` counts the snapshots."""

    def __init__(self) -> None:
        self.looks = self.snapshots = self.histories = 0

    def look(self) -> None:
        self.looks += 1

    def snapshot(self) -> ClusterSnapshot:
        self.snapshots += 1
        return msgspec.convert(EXAMPLE["snapshot"] | {"uptime": float(self.snapshots)}, ClusterSnapshot)

    def requests(self, tenant: str, /) -> list[RequestRow]:
        return []

    def history(self) -> ClusterHistory:
        self.histories += 1
        return msgspec.convert(EXAMPLE["history"], ClusterHistory)
