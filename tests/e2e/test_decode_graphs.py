"""Through all processes, with decode steps over static buffers: the tokens of transformers' generate."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.processes.cluster import running_cluster
from support.processes.families import FAMILIES, assert_family_exact

STATIC = ("--decode-graphs", "static", "--max-num-seqs", "8", "--threads", "1")

pytestmark = pytest.mark.timeout(300)


async def assert_exact_with_graphs(family: str, folder: Path) -> None:
    path = build_checkpoint(family)
    with running_cluster(path, folder, "--served-model-name", family, *STATIC) as cluster:
        await assert_family_exact(cluster, family, path)
        assert cluster.total("pd", "triptych_pd_graph_steps_total") > 0


async def test_mixed_requests_at_once_are_exact(tmp_path: Path) -> None:
    await assert_exact_with_graphs("qwen3_vl", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_vl"])
async def test_every_family_is_exact(family: str, tmp_path: Path) -> None:
    await assert_exact_with_graphs(family, tmp_path)
