"""An encoder that is killed while it captures its graphs starts anew; requests only wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.traffic import ask_all, expected, mixed_cases
from support.processes.cluster import running_cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 64
#: The larger one is for no picture of the test: its capture takes seconds.
GRAPHS = ("--encoder-graphs", "static", "--encoder-graph-budgets", "64,2048")
LOADED, CAPTURED = "of encoder weights", "captured in"


async def test_a_kill_during_a_capture_loses_nothing(tmp_path: Path) -> None:
    path = build_checkpoint("qwen3_vl", tmp_path / "qwen3_vl")
    cases = mixed_cases(6, seed=53)
    with running_cluster(path, tmp_path / "run", "--threads", "1", *GRAPHS) as cluster:

        def count(text: str) -> int:
            return cluster.log.read_text(errors="replace").count(text)

        starts = count(LOADED)
        assert count(CAPTURED) == starts == 1
        cluster.kill("encoder-0")
        wait_for("weights to be loaded again", lambda: count(LOADED) > starts)
        cluster.kill("encoder-0")
        assert count(CAPTURED) == 1, "the second start was not killed before its capture had ended"
        answers = await ask_all(cluster.url, cases, TOKENS)
        assert_exact(expected(path, cases, TOKENS), [answer.token_ids for answer in answers])
        assert (count(LOADED), count(CAPTURED)) == (3, 2)
        assert cluster.total("encoder", "triptych_encoder_graph_hits_total") > 0
