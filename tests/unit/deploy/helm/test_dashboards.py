"""The chart's dashboards ask for metrics that exist and show them in units that fit."""

from __future__ import annotations

import json
import re

import pytest

from support.kubernetes.chart import render
from support.kubernetes.manifests import of_kind
from support.monitoring.grafana import DASHBOARDS, Dashboard
from support.monitoring.metric_table import documented
from support.monitoring.promql import metric_names, selectors

EACH = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)


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


def test_nothing_is_bound_to_one_grafana():
    for dashboard in DASHBOARDS:
        shown = dashboard.document
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
    assert mounted == {f"{dashboard.name}.json": dashboard.document for dashboard in DASHBOARDS}
    assert all(
        one["metadata"]["labels"]["grafana_dashboard"] == "1"
        for one in made
        if "dashboard" in one["metadata"]["name"]
    )
