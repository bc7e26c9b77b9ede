"""Live data of a real cluster: records that add up, and an encoder worker that is killed and comes back."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from support.data.checkpoints import build_checkpoint
from support.data.traffic import picture
from support.processes.cluster import Cluster, data_url, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("live")
    checkpoint = build_checkpoint("qwen3_vl", folder / "qwen3_vl")
    words = ("--encoders", "2", "--threads", "1", "--encoder-batch-patches", "1")
    with running_cluster(checkpoint, folder / "run", *words) as running:
        yield running


def ask(cluster: Cluster, label: str, seeds: Iterator[int] | range) -> Any:
    """The reply to a question about these pictures."""
    images = [
        {"type": "image_url", "image_url": {"url": data_url(picture(seed, 160, 160))}} for seed in seeds
    ]
    content = [*images, {"type": "text", "text": "what is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    return cluster.post(body, label=label)


def record_of(cluster: Cluster, label: str) -> Any:
    """The record of a request that has ended: its spans add up to its time."""
    record = cluster.get(f"/cluster/requests/{label}")
    tiles = [span for span in record["spans"] if span["item"] is None]
    assert tiles[0]["start"] == 0 and tiles[-1]["end"] == record["seconds"]
    assert all(before["end"] == after["start"] for before, after in itertools.pairwise(tiles))
    assert sum(tile["end"] - tile["start"] for tile in tiles) == pytest.approx(record["seconds"], abs=1e-5)
    return record


def test_the_record_of_a_real_request_adds_up(cluster: Cluster) -> None:
    reply = ask(cluster, "first", range(2))
    record = record_of(cluster, "first")
    assert record["completion_tokens"] == reply["usage"]["completion_tokens"]
    assert record["prompt_tokens"] == reply["usage"]["prompt_tokens"]
    seen = cluster.get("/cluster")
    encoders = {worker["name"] for worker in seen["encoders"]}
    (pd_worker,) = (worker["name"] for worker in seen["pd_workers"])
    for item in (0, 1):
        names = [span["name"] for span in record["spans"] if span["item"] == item]
        assert {"preprocess", "encode", "save", "load"} <= set(names)
        where = {
            span["where"] for span in record["spans"] if (span["item"], span["name"]) == (item, "encode")
        }
        assert where <= encoders
    assert {span["where"] for span in record["spans"] if span["name"] in ("prefill", "decode")} == {pd_worker}


def test_top_prints_one_snapshot_for_scripts(cluster: Cluster) -> None:
    words = (sys.executable, "-m", "triptych.apps.cli", "top", "--url", cluster.url, "--once")
    printed = subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=60, check=True)
    seen = json.loads(printed.stdout)
    assert seen.keys() == cluster.get("/cluster").keys()
    text = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "Encoder workers: 2" in text and "PD workers: 1" in text
