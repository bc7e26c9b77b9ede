"""The targets that are scraped."""

from __future__ import annotations

import asyncio
import json

import pytest

from support.options import serve_config
from support.waiting import until
from triptych.apps.launch import cluster_state
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


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    """Each is repeated, twice a second."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cluster_state.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_targets(tmp_path, scrape_targets([], "a:1"))
    assert list(tmp_path.iterdir()) == []


async def test_a_file_that_cannot_be_written_is_tried_again(tmp_path, monkeypatch):
    class Empty:
        async def workers(self) -> list[WorkerInfo]:
            return []

    monkeypatch.setattr(cluster_state, "TARGETS_SECONDS", 0.01)
    folder = tmp_path / "later"
    kept = asyncio.create_task(keep_targets(Empty(), folder, "p"))  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    folder.mkdir()
    await until(lambda: (folder / TARGETS_FILE).exists() or kept.done(), "the file")
    kept.cancel()
    await asyncio.gather(kept, return_exceptions=True)
    assert (folder / TARGETS_FILE).exists()


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
