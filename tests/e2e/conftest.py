"""One cluster for all three families: one store, one proxy, an encoder and a PD worker each."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.processes.cluster import Cluster, start_cluster, wait_for

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "llava")
#: Token budget and block size of each family's PD worker: small, middle and large enough to never chunk.
SHAPES = {"qwen3_vl": (33, 8), "qwen2_5_vl": (64, 16), "llava": (4096, 32)}


@dataclass(frozen=True)
class FamilyCluster:
    cluster: Cluster
    checkpoints: dict[str, Path]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyCluster]:
    folder = tmp_path_factory.mktemp("families")
    paths = {family: build_checkpoint(family, folder / family) for family in FAMILIES}
    first, *others = FAMILIES
    budget, block = SHAPES[first]
    cluster = start_cluster(
        paths[first],
        folder / "run",
        *("--served-model-name", first, "--threads", "1"),
        *("--allow-media-networks", "127.0.0.1/32"),
        *("--max-num-batched-tokens", str(budget), "--block-size", str(block)),
    )
    try:
        for family in others:
            budget, block = SHAPES[family]
            words = (str(paths[family]), "--served-model-name", family, "--threads", "1")
            cluster.add_worker("encoder", *words, "--prepared-memory", "64MiB")
            cluster.add_worker(
                *("pd", *words, "--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB"),
                *("--max-num-batched-tokens", str(budget), "--block-size", str(block)),
            )

        def served() -> bool:
            time.sleep(0.5)  # a look at the registry is dear, and the workers need the cores
            with urllib.request.urlopen(f"{cluster.url}/v1/models", timeout=10) as reply:
                names = {model["id"] for model in json.loads(reply.read())["data"]}
            pools = [worker.model for worker in cluster.workers() if worker.pool == "encoder"]
            return names == set(FAMILIES) and len(pools) == len(FAMILIES)

        wait_for("all families to be served", served)
        yield FamilyCluster(cluster, paths)
    finally:
        cluster.stop()
