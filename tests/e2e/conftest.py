"""One cluster for all three families: one store, one proxy, an encoder and a PD worker each."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.processes.cluster import Cluster, start_cluster, wait_for

#: Token budget and block size of each family's PD worker: small, middle and large enough to never chunk.
SHAPES = {"qwen3_vl": (33, 8), "qwen2_5_vl": (64, 16), "llava": (4096, 32)}


def _words(family: str) -> tuple[str, ...]:
    budget, block = SHAPES[family]
    return ("--max-num-batched-tokens", str(budget), "--block-size", str(block))


class FamilyCluster:
    """Serves the family that it was started with, and each other one from the first time it is asked for."""

    def __init__(self, cluster: Cluster, folder: Path, family: str, path: Path) -> None:
        self.cluster = cluster
        self._folder = folder
        self._checkpoints = {family: path}

    def checkpoint(self, family: str) -> Path:
        """The checkpoint that is served as `family`."""
        if family not in self._checkpoints:
            path = self._checkpoints[family] = build_checkpoint(family, self._folder / family)
            words = (str(path), "--served-model-name", family, "--threads", "1")
            self.cluster.add_worker("encoder", *words, "--prepared-memory", "64MiB")
            memory = ("--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB")
            self.cluster.add_worker("pd", *words, *memory, *_words(family))
            wait_for(f"{family} to be served", self._all_served)
        return self._checkpoints[family]

    def _all_served(self) -> bool:
        time.sleep(0.5)  # a look at the registry is dear, and the workers need the cores
        with urllib.request.urlopen(f"{self.cluster.url}/v1/models", timeout=10) as reply:
            names = {model["id"] for model in json.loads(reply.read())["data"]}
        encoders = [worker.model for worker in self.cluster.workers() if worker.pool == "encoder"]
        return names == self._checkpoints.keys() and len(encoders) == len(names)


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyCluster]:
    """Two families to begin with, so that a request has to name its model."""
    folder, first = tmp_path_factory.mktemp("families"), "qwen3_vl"
    path = build_checkpoint(first, folder / first)
    words = ("--served-model-name", first, "--threads", "1", "--allow-media-networks", "127.0.0.1/32")
    cluster = start_cluster(path, folder / "run", *words, *_words(first))
    try:
        served = FamilyCluster(cluster, folder, first, path)
        served.checkpoint("qwen2_5_vl")
        yield served
    finally:
        cluster.stop()
