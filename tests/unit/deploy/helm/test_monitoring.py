"""The chart's alerts and dashboards ask for metrics that exist; each alert has its place in the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.kubernetes.chart import render
from support.kubernetes.manifests import of_kind
from support.monitoring.alerts import FILE, alert_rules, rules
from support.monitoring.grafana import DASHBOARDS, Dashboard
from support.monitoring.metric_table import documented
from support.monitoring.promql import metric_names, selectors

DOCS = Path(__file__).parents[4] / "docs"
EACH = pytest.mark.parametrize("rule", alert_rules().values(), ids=lambda rule: rule["alert"])


def test_expressions_ask_for_series_and_labels_that_exist():
    labels = {name: set(metric.labels) for metric in documented() for name in metric.series}
    labels |= {name: kept | {"le"} for name, kept in labels.items() if name.endswith("_bucket")}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        assert metric_names(rule["expr"]) <= labels.keys() | recorded, rule
        for name, asked in selectors(rule["expr"]):
            assert asked <= labels.get(name, set()), (rule, name)


#: Metrics of kube-state-metrics.
OTHERS = {"kube_pod_container_resource_requests": {"resource"}}


@EACH
def test_an_alert_has_a_severity_a_summary_and_a_place_in_the_runbook(rule: dict[str, Any]):
    assert rule["alert"].startswith("Triptych")
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{rule['alert'].lower()}"


@EACH
def test_an_alert_is_explained(rule: dict[str, Any]):
    text = (DOCS / "alerts.md").read_text()
    _, found, rest = text.partition(f"\n## {rule['alert']}\n")
    part = rest.partition("\n## ")[0]
    assert found
    assert all(f"**{word}**" in part for word in ("Meaning.", "First look.", "Remedy."))


def test_the_chart_makes_a_prometheus_rule_of_them_as_they_are():
    (made,) = of_kind(render({"prometheusRules": {"enabled": True}}), "PrometheusRule")
    assert made["spec"] == yaml.safe_load(FILE.read_text())


EACH_DASHBOARD = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)


@EACH_DASHBOARD
def test_queries_ask_for_series_and_labels_that_exist(dashboard: Dashboard):
    labels = {name: set(metric.labels) for metric in documented() for name in metric.series} | OTHERS
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
