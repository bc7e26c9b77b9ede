"""The chart's Grafana dashboards, read from their files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "deploy" / "helm" / "triptych" / "files" / "dashboards"
NAMES = ("overview", "encoder-pool", "pd", "store")


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph, or the newest number alone. `unit` is Grafana's name of it."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    help: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard: what its file holds, and its panels without the headings."""

    name: str
    document: dict[str, Any]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in order."""
        return tuple(_panel(one) for one in self.document["panels"] if one["type"] != "row")


def _panel(shown: dict[str, Any]) -> Panel:
    queries = tuple(Query(target["expr"], target["legendFormat"]) for target in shown["targets"])
    return Panel(shown["title"], shown["fieldConfig"]["defaults"]["unit"], queries, shown["description"])


DASHBOARDS = tuple(Dashboard(name, json.loads((FOLDER / f"{name}.json").read_text())) for name in NAMES)
