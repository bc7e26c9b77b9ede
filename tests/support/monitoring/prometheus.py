"""A Prometheus of Debian's that scrapes a running cluster, as docs/metrics.md says."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.processes.cluster import free_port, wait_for
from support.tools import tool

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
SCRAPE_SECONDS = 1
_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a range query: its labels, and its points as (time, value)."""

    labels: dict[str, str]
    points: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    url: str

    def range(self, expr: str, seconds: float, step: float = 1.0) -> list[Line]:
        """The expression over the last seconds; AssertionError with its words where it is wrong."""
        end = time.time()
        words = {"query": expr, "start": end - seconds, "end": end, "step": step}
        return [
            Line(row["metric"], [(float(at), float(value)) for at, value in row["values"]])
            for row in self._get("query_range", words)["result"]
        ]

    def targets(self) -> list[dict[str, Any]]:
        """The targets that are scraped, with their health."""
        found: list[dict[str, Any]] = self._get("targets", {"state": "active"})["activeTargets"]
        return found

    def _get(self, what: str, words: dict[str, Any]) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(words)}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT) as reply:
                return json.loads(reply.read())["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{words}: {error.read().decode()}") from None


def scrape_config(run_dir: Path) -> dict[str, Any]:
    """The scrape config of the docs for a cluster's folder, at a test's pace."""
    block = re.search(r"```yaml\n(scrape_configs:.*?)```", DOCS.read_text(), re.DOTALL)
    assert block is not None
    config: dict[str, Any] = yaml.safe_load(block[1].replace("DIR/", f"{run_dir}/"))
    for job in config["scrape_configs"]:
        job["scrape_interval"] = f"{SCRAPE_SECONDS}s"
        for found in job["file_sd_configs"]:
            found["refresh_interval"] = "1s"
    return config


@contextlib.contextmanager
def running_prometheus(run_dir: Path, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the cluster of `run_dir`, for the length of a `with`."""
    folder.mkdir(parents=True, exist_ok=True)
    config, port = folder / "prometheus.yml", free_port()
    config.write_text(yaml.safe_dump(scrape_config(run_dir)))
    command = [
        tool("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_for("Prometheus to scrape all targets", lambda: _all_up(server))
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _all_up(server: Prometheus) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/-/ready", timeout=_TIMEOUT):
            targets = server.targets()
    except OSError:  # 503 until its storage is open
        return False
    return len(targets) >= 3 and all(target["health"] == "up" for target in targets)
