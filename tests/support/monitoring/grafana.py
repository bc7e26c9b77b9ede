"""Grafana dashboards, written from short descriptions of their panels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Grafana's version whose schema the files follow; later ones migrate it.
SCHEMA = 39
_WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph, or with `stat` the newest number alone.

    `unit` is Grafana's name of it. `quiet`: no series while all is well, or where a feature is not in use.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    help: str
    stat: bool = False
    quiet: bool = False
    width: int = 8


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard: rows of panels under headings. `name` is the file's."""

    name: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in order."""
        return tuple(panel for _, panels in self.rows for panel in panels)


def q(expr: str, legend: str) -> Query:
    """A query in which NS and M stand for the selectors of namespace, and of namespace and model."""
    return Query(
        expr.replace("{M", '{namespace=~"$namespace",model_name=~"$model"').replace(
            "{NS", '{namespace=~"$namespace"'
        ),
        legend,
    )


def quantiles(metric: str, selector: str, *more: str) -> tuple[Query, ...]:
    """Median, 95th and 99th percentile of a histogram over all its processes."""
    rate = f"sum by (le) (rate({metric}_bucket{{{selector}}}[$__rate_interval]))"
    return tuple(q(f"histogram_quantile({p / 100:g}, {rate})", f"p{p}") for p in (50, 95, 99))


def mean(metric: str, selector: str, legend: str) -> Query:
    """The average observation of a histogram; no series while there is none."""
    total, count = (f"sum(rate({metric}_{end}{{{selector}}}[$__rate_interval]))" for end in ("sum", "count"))
    return q(f"{total} / ({count} > 0)", legend)


def document(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana reads it: no id, no data source of its own."""
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, row in dashboard.rows:
        panels.append(_row(heading, len(panels) + 1, y))
        y += 1
        x = height = 0
        for panel in row:
            if x + panel.width > _WIDTH:
                x, y = 0, y + height
            height = 4 if panel.stat else 8
            place = {"x": x, "y": y, "w": panel.width, "h": height}
            panels.append(_panel(panel, len(panels) + 1, place))
            x += panel.width
        y += height
    return {
        "uid": f"triptych-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["triptych"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "Triptych",
                "tags": ["triptych"],
                "asDropdown": True,
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"},
        _label_variable("namespace", "triptych_build_info", "namespace"),
        _label_variable("model", 'vllm:num_requests_running{namespace=~"$namespace"}', "model_name"),
    ]


def _label_variable(name: str, metric: str, label: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": f"label_values({metric}, {label})", "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": place,
        "panels": [],
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    options: dict[str, Any] = (
        {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
        if panel.stat
        else {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    )
    custom: dict[str, Any] = {} if panel.stat else {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}
    least = {} if panel.unit.startswith("dateTime") else {"min": 0}
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **least, "noValue": "-", "custom": custom},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }
