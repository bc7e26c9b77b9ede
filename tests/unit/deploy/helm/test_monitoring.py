"""Monitoring and network policies of the chart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.kubernetes.chart import CASES, Manifest, case, render
from support.kubernetes.manifests import component, of_kind, peer, workloads
from support.kubernetes.reach import Peer, allowed, selects
from support.monitoring.alerts import FILE, alert_rules, rules
from support.monitoring.metric_table import documented

FOLDER = Path(__file__).parents[4] / "deploy" / "helm" / "triptych" / "files" / "dashboards"
NAMES = ("overview", "encoder-pool", "pd", "store")


DASHBOARDS = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in NAMES}


_AGGREGATIONS = {"sum", "max", "min", "avg", "count", "by", "without"}
_FUNCTIONS = {
    "rate",
    "increase",
    "changes",
    "histogram_quantile",
    "clamp_min",
    "absent",
    "time",
    "sum_over_time",
}
_OPERATORS = {"on", "ignoring", "and", "or", "unless", "bool", "offset", "vector", "group_left"}
_WORDS = _AGGREGATIONS | _FUNCTIONS | _OPERATORS
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*({[^}]*})")
_LABEL = re.compile(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)")


def metric_names(expr: str) -> set[str]:
    """The names of the series in an expression."""
    bare = re.sub(r'"[^"]*"', '""', expr)
    bare = re.sub(r"\b(?:by|on|ignoring|without|group_left)\s*\([^)]*\)", " ", bare)
    bare = re.sub(r"{[^}]*}|\[[^\]]*\]", " ", bare)
    return {word for word in re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare) if word not in _WORDS}


def selectors(expr: str) -> list[tuple[str, set[str]]]:
    """Each series with the labels that it is selected by; those without a selector have none."""
    found = [(name, set(_LABEL.findall(labels))) for name, labels in _SELECTOR.findall(expr)]
    named = {name for name, _ in found}
    return found + [(name, set()) for name in metric_names(expr) - named]


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
    assert rule["annotations"]["runbook_url"] == f"docs/observe.md#{rule['alert'].lower()}"


@EACH
def test_an_alert_is_explained(rule: dict[str, Any]):
    text = (DOCS / "observe.md").read_text()
    _, found, rest = text.partition(f"\n### {rule['alert']}\n")
    part = rest.partition("\n### ")[0]
    assert found
    assert all(f"**{word}**" in part for word in ("Meaning.", "First look.", "Remedy."))


def test_the_chart_makes_a_prometheus_rule_of_them_as_they_are():
    (made,) = of_kind(render({"prometheusRules": {"enabled": True}}), "PrometheusRule")
    assert made["spec"] == yaml.safe_load(FILE.read_text())


def test_with_an_address_of_the_pages_whoever_is_on_call_can_follow_a_runbook():
    values = {"prometheusRules": {"enabled": True, "documents": "https://wiki.example/triptych/"}}
    (made,) = of_kind(render(values), "PrometheusRule")
    urls = [
        rule["annotations"]["runbook_url"]
        for group in made["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(urls) == len(alert_rules())
    assert all(url.startswith("https://wiki.example/triptych/docs/observe.md#triptych") for url in urls)


def panels(name: str) -> list[dict[str, Any]]:
    """Those of a dashboard, in order and without the headings."""
    return [panel for panel in DASHBOARDS[name]["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("name", NAMES)
def test_a_panel_has_a_title_a_description_a_unit_and_legends(name: str):
    for panel in panels(name):
        assert {"title", "description"} <= panel.keys() and "unit" in panel["fieldConfig"]["defaults"]
        assert all("legendFormat" in target for target in panel["targets"]), panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_queries_ask_for_series_and_labels_that_exist(name: str):
    labels = {name: set(metric.labels) for metric in documented() for name in metric.series} | OTHERS
    for query in (target["expr"] for panel in panels(name) for target in panel["targets"]):
        assert metric_names(query) <= labels.keys(), query
        for series, asked in selectors(query):
            assert asked <= labels[series] | {"namespace", "pod"}, query
            assert "namespace" in asked, query
            assert ("model_name" in asked) == ("model_name" in labels[series]), query


def test_nothing_is_bound_to_one_grafana():
    for name, shown in DASHBOARDS.items():
        assert "id" not in shown
        uids = set(re.findall(r'"uid": "([^"]*)"', json.dumps(shown)))
        assert uids == {"${datasource}", f"triptych-{name}"}
        names = [variable["name"] for variable in shown["templating"]["list"]]
        assert names == ["datasource", "namespace", "model"]


def test_the_chart_mounts_them_as_they_are():
    made = of_kind(render({"dashboards": {"enabled": True}}), "ConfigMap")
    mounted = {
        name: json.loads(text) for one in made for name, text in one["data"].items() if ".json" in name
    }
    assert mounted == {f"{name}.json": shown for name, shown in DASHBOARDS.items()}
    assert all(
        one["metadata"]["labels"]["grafana_dashboard"] == "1"
        for one in made
        if "dashboard" in one["metadata"]["name"]
    )


PROMETHEUS = Peer({"app": "prometheus"}, "monitoring")
KEDA = Peer({"app": "keda-operator"}, "keda")
DNS = Peer({"k8s-app": "kube-dns"}, "kube-system")
STRANGER = Peer({"app": "shop"}, "default")
PUBLIC = Peer(address="93.184.215.14")
METADATA = Peer(address="169.254.169.254")
SERVERS = ("proxy", "encoder", "pd", "colocated")


def policies(manifests: list[Manifest]) -> list[Manifest]:
    return of_kind(manifests, "NetworkPolicy")


def pods(manifests: list[Manifest]) -> dict[str, Peer]:
    """One pod of each component."""
    return {component(one): peer(one) for one in workloads(manifests)}


#: In the other one pods are on their nodes' network, which no selector of pods finds: test_placement.py.
IN_THE_POD_NETWORK = [name for name in CASES if name != "host-network"]


@pytest.fixture(params=IN_THE_POD_NETWORK)
def network(request: pytest.FixtureRequest) -> tuple[list[Manifest], dict[str, Peer]]:
    """The policies of a case of values, and one pod of each component."""
    return policies(case(request.param)), pods(case(request.param))


@pytest.mark.parametrize("name", CASES)
def test_every_service_and_pod_has_a_policy_for_both_directions(name: str) -> None:
    manifests = case(name)
    for manifest in workloads(manifests):
        own = [
            one for one in policies(manifests) if selects(one["spec"]["podSelector"], peer(manifest).labels)
        ]
        (policy,) = own
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    for service in of_kind(manifests, "Service"):
        covered = [
            one
            for one in policies(manifests)
            if one["spec"]["podSelector"]["matchLabels"].items() <= service["spec"]["selector"].items()
        ]
        opened = {
            port["port"] for one in covered for rule in one["spec"]["ingress"] for port in rule["ports"]
        }
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= opened


def test_services_reach_what_they_need(network) -> None:
    rules, found = network
    for role, pod in found.items():
        if role == "store":
            continue
        assert allowed(rules, pod, DNS, 53, "UDP")
        if role in SERVERS:
            assert allowed(rules, PROMETHEUS, pod, 9100)
        if role in ("encoder", "pd", "colocated"):
            assert allowed(rules, found["proxy"], pod, 50051)
        if "store" in found and role in SERVERS:
            assert allowed(rules, pod, found["store"], 6379)
    for reader in ("pd", "colocated"):
        for server in ("encoder", "colocated"):
            if reader in found and server in found:
                assert allowed(rules, found[reader], found[server], 50052)
    if "scaler" in found["proxy"].ports:
        assert allowed(rules, KEDA, found["proxy"], 6000)
    assert allowed(rules, Peer({}, "gateways"), found["proxy"], 8000)


def test_nobody_else_reaches_workers_store_metrics_or_scaler(network) -> None:
    rules, found = network
    for source in (STRANGER, PROMETHEUS, KEDA, PUBLIC, Peer(found["proxy"].labels, "elsewhere")):
        for role in ("encoder", "pd", "colocated", "store"):
            if role in found:
                assert not allowed(rules, source, found[role], 50051)
                assert not allowed(rules, source, found[role], 6379)
                assert not allowed(rules, source, found[role], 50052)
    for source in (STRANGER, KEDA, PUBLIC):
        assert not [role for role in SERVERS if role in found and allowed(rules, source, found[role], 9100)]
    for source in (STRANGER, PROMETHEUS, PUBLIC):
        assert not allowed(rules, source, found["proxy"], 6000)


@pytest.mark.parametrize("name", CASES)
def test_proxies_alone_reach_the_internet_and_nobody_reaches_metadata_or_private_networks(name: str) -> None:
    manifests = case(name)
    rules, found = policies(manifests), pods(manifests)
    inside = [
        METADATA,
        *(Peer(address=one) for one in ("10.0.0.1", "172.20.1.1", "192.168.1.1", "100.64.0.1")),
    ]
    inside += [Peer(address=one) for one in ("fd00::1", "fe80::1", "::1")]
    for role, pod in found.items():
        online = role == "download" or (role == "proxy" and name != "air-gapped")
        assert allowed(rules, pod, PUBLIC, 443) is online
        assert allowed(rules, pod, Peer(address="2606:4700::1"), 443) is online
        assert not allowed(rules, pod, PUBLIC, 22)
        assert not [one for one in inside for port in (80, 443, 8080) if allowed(rules, pod, one, port)]


def test_workers_do_not_reach_each_other_and_the_store_reaches_nothing(network) -> None:
    rules, found = network
    for role in ("encoder", "pd", "colocated", "store"):
        for other in found:
            if role in found and other != "store":
                assert not allowed(rules, found[role], found[other], 50051)
                assert not allowed(rules, found[role], found[other], 8000)
    if "store" in found:
        assert not allowed(rules, found["store"], DNS, 53, "UDP")


def test_a_media_server_inside_is_reached_by_an_egress_rule() -> None:
    manifests = case("air-gapped")
    found = pods(manifests)
    assert allowed(policies(manifests), found["proxy"], Peer(address="10.1.2.3"), 443)
    assert not allowed(policies(manifests), found["encoder"], Peer(address="10.1.2.3"), 443)


def test_workers_that_download_reach_the_hub_and_nothing_private() -> None:
    model = {"source": "download", "name": "m", "download": {"id": "a/b"}}
    manifests = render({"model": model, "networkPolicy": {"internet": {"enabled": False}}})
    found = pods(manifests)
    for role in ("encoder", "pd"):
        assert allowed(policies(manifests), found[role], PUBLIC, 443)
        assert not allowed(policies(manifests), found[role], PUBLIC, 80)
        assert not allowed(policies(manifests), found[role], METADATA, 443)
    assert not allowed(policies(manifests), found["proxy"], PUBLIC, 443)


def test_two_releases_in_one_namespace_do_not_reach_each_other() -> None:
    blue, green = render(name="blue"), render(name="green")
    rules = [*policies(blue), *policies(green)]
    for role, port in (("encoder", 50051), ("pd", 50051), ("store", 6379)):
        assert allowed(rules, pods(blue)["proxy"], pods(blue)[role], port)
        assert not allowed(rules, pods(blue)["proxy"], pods(green)[role], port)
