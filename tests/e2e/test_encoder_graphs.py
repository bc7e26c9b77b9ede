"""Every family with encoder graphs, through HTTP, proxy, encoder worker, store and PD worker: as `generate`.

The graphs are static buffers with plain calls: they run on a CPU.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.processes.cluster import Cluster, start_cluster, wait_for
from support.processes.families import ENC_DEC, PICTURES, assert_family_exact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GRAPHS = ("--encoder-graphs", "static")


@contextmanager
def served(families: Sequence[str], folder: Path) -> Iterator[Cluster]:
    """One store and one proxy, and for each family an encoder with graphs and a PD worker."""
    first, *others = families
    paths = {family: build_checkpoint(family) for family in families}
    name = ("--served-model-name", first, "--threads", "1")
    cluster = start_cluster(paths[first], folder / "run", *name, *GRAPHS)
    try:
        for family in others:
            words = (str(paths[family]), "--served-model-name", family, "--threads", "1")
            cluster.add_worker("encoder", *words, "--prepared-memory", "64MiB", *GRAPHS)
            memory = ("--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB")
            cluster.add_worker("pd", *words, *memory)

        def all_served() -> bool:
            time.sleep(0.5)  # a look at the registry is dear, and the workers need the cores
            with urllib.request.urlopen(f"{cluster.url}/v1/models", timeout=10) as reply:
                names = {model["id"] for model in json.loads(reply.read())["data"]}
            encoders = [worker for worker in cluster.workers() if worker.pool == "encoder"]
            return names == set(families) and len(encoders) == len(families)

        wait_for("all families to be served", all_served)
        yield cluster
    finally:
        cluster.stop()


def assert_by_graphs(cluster: Cluster) -> None:
    """Everything was encoded by replays."""
    hits = cluster.total("encoder", "triptych_encoder_graph_hits_total")
    assert hits == cluster.total("encoder", "triptych_encoder_tower_items_total") > 0
    assert cluster.total("encoder", "triptych_encoder_graph_misses_total") == 0


async def test_models_with_pictures_are_exact_with_graphs(tmp_path: Path) -> None:
    with served(PICTURES, tmp_path) as cluster:
        for family in PICTURES:
            await assert_family_exact(cluster, family, build_checkpoint(family))
        assert_by_graphs(cluster)


async def test_encoder_decoder_models_are_exact_with_graphs(tmp_path: Path) -> None:
    with served(ENC_DEC, tmp_path) as cluster:
        for family in ENC_DEC:
            await assert_family_exact(cluster, family, build_checkpoint(family))
        assert_by_graphs(cluster)
