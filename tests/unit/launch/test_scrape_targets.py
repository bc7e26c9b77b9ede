"""The targets that are scraped."""

from __future__ import annotations

import asyncio
import json

import pytest

from support.options import serve_config
from triptych.apps.launch.cluster_state import TARGETS_FILE, keep_targets, scrape_targets, write_targets
from triptych.apps.launch.plan.cluster import plan_cluster
from triptych.apps.launch.plan.cores import share_cores
from triptych.base.types import WorkerInfo
from triptych.store.control import StoreUnavailable


def _info(address: str, pool: str, port: int = 9100) -> WorkerInfo:
    return WorkerInfo(address, pool, "i", "k" * 64, "m", (), {"metrics_port": port}, "image")


def test_workers_are_named_by_the_port_of_their_metrics_and_their_pool():
    workers = [_info("127.0.0.1:50051", "pd", 9101), _info("[fd00::7]:50052", "encoder", 9102)]
    assert scrape_targets(workers, "127.0.0.1:8000") == [
        {"targets": ["127.0.0.1:8000"], "labels": {"component": "proxy"}},
        {"targets": ["127.0.0.1:9101"], "labels": {"component": "pd"}},
        {"targets": ["[fd00::7]:9102"], "labels": {"component": "encoder"}},
    ]


def test_the_file_is_replaced_only_when_it_says_something_else(tmp_path):
    write_targets(tmp_path, scrape_targets([], "a:1"))
    first = (tmp_path / TARGETS_FILE).stat().st_ino
    write_targets(tmp_path, scrape_targets([], "a:1"))
    assert (tmp_path / TARGETS_FILE).stat().st_ino == first
    write_targets(tmp_path, scrape_targets([], "b:1"))
    assert json.loads((tmp_path / TARGETS_FILE).read_text())[0]["targets"] == ["b:1"]
    assert [path.name for path in tmp_path.iterdir()] == [TARGETS_FILE]


async def test_while_the_store_is_away_the_file_stays(tmp_path):
    class Away:
        async def workers(self) -> list[WorkerInfo]:
            raise StoreUnavailable("switched off")

    write_targets(tmp_path, scrape_targets([_info("a:1", "pd")], "p"))
    before = (tmp_path / TARGETS_FILE).read_text()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await keep_targets(Away(), tmp_path, "p")  # type: ignore[arg-type]
    assert (tmp_path / TARGETS_FILE).read_text() == before


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ([], "127.0.0.1:8000"),
        (["--port", "9000", "--host", "0.0.0.0"], "127.0.0.1:9000"),
        (["--metrics-port", "9100"], "127.0.0.1:9100"),
        (["--metrics-port", "9100", "--metrics-host", "10.0.0.7"], "10.0.0.7:9100"),
        (["--metrics-port", "9100", "--host", "::"], "[::1]:9100"),
    ],
)
def test_the_proxy_is_asked_where_its_metrics_are(tmp_path, words, address):
    assert plan_cluster(share_cores(serve_config(*words), 2), tmp_path).proxy_metrics == address
