"""The chart's dashboards are those of their descriptions, and ask for metrics that exist.

TRIPTYCH_WRITE_METRICS=1 writes the files anew in place of comparing them.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from support.kubernetes.chart import render
from support.kubernetes.manifests import of_kind
from support.monitoring.dashboards import DASHBOARDS
from support.monitoring.grafana import Dashboard, document
from support.monitoring.metric_table import documented
from support.monitoring.promql import metric_names, selectors

FOLDER = Path(__file__).parents[4] / "deploy" / "helm" / "triptych" / "files" / "dashboards"
#: Units of Grafana that the panels use.
UNITS = {"none", "s", "ops", "reqps", "bytes", "Bps", "percentunit", "dateTimeFromNow"}
EACH = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)


def _json(dashboard: Dashboard) -> str:
    return json.dumps(document(dashboard), indent=1, ensure_ascii=False) + "\n"


@EACH
def test_a_file_is_that_of_its_description(dashboard: Dashboard):
    path = FOLDER / f"{dashboard.name}.json"
    if os.environ.get("TRIPTYCH_WRITE_METRICS"):
        FOLDER.mkdir(parents=True, exist_ok=True)
        path.write_text(_json(dashboard))
    assert path.read_text() == _json(dashboard), "write it anew with TRIPTYCH_WRITE_METRICS=1"


def test_no_other_dashboard_is_shipped():
    assert {path.stem for path in FOLDER.iterdir()} == {dashboard.name for dashboard in DASHBOARDS}


@EACH
def test_queries_ask_for_series_and_labels_that_exist(dashboard: Dashboard):
    labels = {name: set(metric.labels) for metric in documented() for name in metric.series}
    for panel in dashboard.panels:
        for query in panel.queries:
            assert metric_names(query.expr) <= labels.keys(), query.expr
            for name, asked in selectors(query.expr):
                assert asked <= labels[name] | {"namespace", "pod"}, (panel.title, query.expr)
                assert "namespace" in asked, (panel.title, query.expr)
                assert ("model_name" in asked) == ("model_name" in labels[name]), (panel.title, query.expr)


@EACH
def test_legends_name_labels_that_the_query_leaves(dashboard: Dashboard):
    for panel in dashboard.panels:
        for query in panel.queries:
            wanted = set(re.findall(r"{{(\w+)}}", query.legend))
            by = re.match(r"(?:sum|max|min) by \(([\w, ]+)\)", query.expr)
            left = set(by[1].split(", ")) if by else {"pod"} if " on (pod) " in query.expr else set()
            assert wanted == left, (panel.title, query)


@EACH
def test_panels_have_a_unit_an_explanation_and_a_place_of_their_own(dashboard: Dashboard):
    assert len({panel.title for panel in dashboard.panels}) == len(dashboard.panels)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.panels:
        assert panel.unit in UNITS and panel.help.endswith(".")
    for shown in document(dashboard)["panels"]:
        place = shown["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24 and not cells & taken, shown["title"]
        taken |= cells


@EACH
def test_rates_are_per_second_and_seconds_are_seconds(dashboard: Dashboard):
    """A unit that does not fit the metric's name is a wrong axis."""
    for panel in dashboard.panels:
        for query in panel.queries:
            ratio, rated = " / (" in query.expr, "rate(" in query.expr
            names = " ".join(metric_names(query.expr))
            if panel.unit == "s":
                assert "_seconds" in names
            elif panel.unit == "bytes":
                assert ("_bytes" in names or 'quota="bodies"' in query.expr) and not rated
            elif panel.unit == "Bps":
                assert "_bytes" in names and rated
            elif panel.unit in ("ops", "reqps"):
                assert rated and "increase(" not in query.expr and not ratio
            elif panel.unit == "percentunit":
                assert ratio or "_perc" in names or "_seconds_sum" in names


def test_nothing_is_bound_to_one_grafana():
    for dashboard in DASHBOARDS:
        shown = document(dashboard)
        assert "id" not in shown
        assert set(re.findall(r'"uid": "([^"]*)"', json.dumps(shown))) == {
            "${datasource}",
            f"triptych-{dashboard.name}",
        }
        names = [variable["name"] for variable in shown["templating"]["list"]]
        assert names == ["datasource", "namespace", "model"]


def test_the_chart_mounts_them_as_they_are():
    made = of_kind(render({"dashboards": {"enabled": True}}), "ConfigMap")
    mounted = {
        name: json.loads(text) for one in made for name, text in one["data"].items() if ".json" in name
    }
    assert mounted == {f"{dashboard.name}.json": document(dashboard) for dashboard in DASHBOARDS}
    assert all(
        one["metadata"]["labels"]["grafana_dashboard"] == "1"
        for one in made
        if "dashboard" in one["metadata"]["name"]
    )
