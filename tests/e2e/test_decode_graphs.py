"""Decode steps over static buffers through all processes: the tokens of transformers' generate."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.processes.cluster import running_cluster
from support.processes.families import assert_family_exact

STATIC = ("--decode-graphs", "static", "--max-num-seqs", "8", "--threads", "1")

pytestmark = pytest.mark.timeout(300)


async def test_mixed_requests_at_once_are_exact(tmp_path: Path) -> None:
    path = build_checkpoint("qwen3_vl")
    with running_cluster(path, tmp_path, "--served-model-name", "qwen3_vl", *STATIC) as cluster:
        await assert_family_exact(cluster, "qwen3_vl", path)
        assert cluster.total("pd", "triptych_pd_graph_steps_total") > 0
