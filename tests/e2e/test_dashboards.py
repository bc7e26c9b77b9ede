"""Every query of every dashboard, by a real Prometheus, of a cluster under mixed load."""

from __future__ import annotations

import math
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from support.data.checkpoints import build_checkpoint
from support.data.traffic import picture
from support.monitoring.grafana import DASHBOARDS, Dashboard, Panel
from support.monitoring.prometheus import Line, Prometheus, running_prometheus
from support.processes.cluster import Cluster, data_url, running_cluster
from support.tools import tool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LOAD_SECONDS = 45
CLIENTS = 3
#: Panels with no series while all is well, or where a feature is not in use.
QUIET = {"Refused keys", "Resumed requests", "Fetched media", "Poison", "Certificates expire"}
QUIET |= {"Failed jobs", "Work", "Workers, live and wanted", "Decisions", "Cold start"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Prometheus]]:
    """A cluster that has been under mixed load for a while and still is, and its Prometheus."""
    folder = tmp_path_factory.mktemp("monitored")
    model = build_checkpoint("qwen3_vl", folder / "qwen3_vl")
    words = ("--threads", "1", "--encoders", "1..2", "--max-queue", "8", "--log-format", "json")
    with (
        running_cluster(model, folder / "run", *words) as cluster,
        running_prometheus(folder / "run", folder / "prometheus") as prometheus,
        _Load(cluster),
    ):
        time.sleep(LOAD_SECONDS)
        yield cluster, prometheus


class _Load:
    """Clients that send mixed requests: new and known pictures, text alone, and some that are refused."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _client(self, number: int) -> None:
        sent = 0
        while not self._stop.is_set():
            sent += 1
            self._cluster.post(_request(number * 1000 + sent))


def _request(seed: int) -> dict[str, object]:
    content: list[dict[str, object]] = [{"type": "text", "text": f"what is it, number {seed}? " * 3}]
    if seed % 4:
        shown = picture(seed if seed % 4 < 3 else 1, 96, 64)
        content.insert(0, {"type": "image_url", "image_url": {"url": data_url(shown)}})
    return {
        "model": "no such model" if seed % 16 == 0 else "",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4 + seed % 13,
        "n": 9 if seed % 17 == 0 else 1,
    }


def _shown(prometheus: Prometheus, panel: Panel) -> dict[str, list[Line]]:
    """The series of each query of a panel, by its legend."""
    found = {}
    for query in panel.queries:
        expr = query.expr.replace("$__rate_interval", "15s")
        expr = expr.replace("$namespace", ".*").replace("$model", ".*")
        found[query.legend] = prometheus.range(expr, LOAD_SECONDS - 15)
    return found


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
def test_every_panel_shows_numbers(loaded: tuple[Cluster, Prometheus], dashboard: Dashboard):
    _, prometheus = loaded
    lines = {panel.title: _shown(prometheus, panel) for panel in dashboard.panels}
    wrong = []
    for panel in dashboard.panels:
        for legend, found in lines[panel.title].items():
            values = [value for line in found for _, value in line.points]
            if not values and panel.title not in QUIET:
                wrong.append(f"{panel.title}, {legend}: no series")
            plausible = _plausible(panel.unit)
            if odd := [value for value in values if not plausible(value)]:
                wrong.append(f"{panel.title}, {legend}: {odd[:3]}")
    assert not wrong, "\n".join(wrong)


def _plausible(unit: str) -> Callable[[float], bool]:
    """Whether a value can be of this unit, in this test."""
    most = {"percentunit": 1.05, "s": 600.0, "reqps": 1e4, "ops": 1e5}.get(unit, 1e12)
    return lambda value: math.isfinite(value) and 0.0 <= value <= most


def test_all_processes_are_found_once_and_named_by_their_component(loaded: tuple[Cluster, Prometheus]):
    _, prometheus = loaded
    found = [target["labels"]["component"] for target in prometheus.targets()]
    assert sorted(set(found)) == ["encoder", "pd", "proxy"]
    assert len({target["labels"]["pod"] for target in prometheus.targets()}) == len(found)


def test_promtool_finds_no_fault_but_with_vllms_names(loaded: tuple[Cluster, Prometheus]):
    for target in loaded[1].targets():
        with urllib.request.urlopen(target["scrapeUrl"], timeout=30) as reply:
            page = reply.read()
        done = subprocess.run(
            [tool("promtool"), "check", "metrics"], input=page, capture_output=True, timeout=60
        )
        said = (done.stdout + done.stderr).decode().splitlines()
        ours = [line for line in said if not line.startswith("vllm:")]
        assert not ours
        assert done.returncode in (0, 3)


def test_what_clients_send_makes_no_series(loaded: tuple[Cluster, Prometheus]):
    """300 model names, request ids and keys, and the page has as many lines as before."""
    cluster, _ = loaded

    def lines() -> int:
        with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=30) as reply:
            return len(reply.read().splitlines())

    before = lines()
    for number in range(300):
        request = urllib.request.Request(
            f"{cluster.url}/v1/chat/completions",
            data=b'{"model": "m%d", "messages": [{"role": "user", "content": "x"}]}' % number,
            headers={"X-Request-ID": f"id-{number}", "Authorization": f"Bearer key-{number}"},
        )
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=30)
    # The load goes on: a status or two may be new.
    assert lines() - before < 10
