"""One cluster for all three families: one store, one proxy, an encoder and a PD worker each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.processes.families import FamilyCluster

#: Token budget and block size of each family's PD worker: small, middle and large enough to never chunk.
SHAPES = {"qwen3_vl": (33, 8), "qwen2_5_vl": (64, 16), "llava": (4096, 32)}


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyCluster]:
    """Two families to begin with, so that a request has to name its model."""
    shapes = {
        family: ("--max-num-batched-tokens", str(budget), "--block-size", str(block))
        for family, (budget, block) in SHAPES.items()
    }
    served = FamilyCluster(tmp_path_factory.mktemp("families"), shapes)
    served.start("qwen3_vl", "--allow-media-networks", "127.0.0.1/32")
    try:
        served.checkpoint("qwen2_5_vl")
        yield served
    finally:
        served.cluster.stop()
