"""A replica whose tower runs by graphs, beside a decoder in the same process, answers as `generate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import ask_all, expected, mixed_cases
from support.processes.cluster import running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 48


async def test_a_replica_with_graphs_is_exact(tmp_path: Path) -> None:
    path = build_checkpoint("qwen2_5_vl", tmp_path / "qwen2_5_vl")
    words = ("--topology", "colocated", "--threads", "1", "--encoder-graphs", "static")
    cases = mixed_cases(12, seed=59)
    with running_cluster(path, tmp_path / "run", *words) as cluster:
        answers = await ask_all(cluster.url, cases, TOKENS)
        assert_exact(expected(path, cases, TOKENS), [answer.token_ids for answer in answers])
        hits = cluster.total("encoder", "triptych_encoder_graph_hits_total")
        assert hits == cluster.total("encoder", "triptych_encoder_tower_items_total") > 0
