"""Encoder graphs, decode graphs, two tower ranks and two PD ranks at once: the tokens of generate.

The graphs are static buffers with plain calls, and the ranks meet by gloo: all of it runs on a CPU.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.chaos.rest import assert_at_rest
from support.data.checkpoints import build_checkpoint
from support.processes.cluster import running_cluster
from support.processes.families import FAMILIES, assert_family_exact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EVERYTHING = (
    *("--threads", "1", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
    *("--encoder-graphs", "static", "--decode-graphs", "static"),
    *("--encoder-data-parallel", "2", "--tensor-parallel", "2"),
)
#: T5's usual tiny checkpoint has an odd number of heads.
VARIANTS = {"t5": "even"}


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_is_exact_with_all_of_them(family: str, tmp_path: Path) -> None:
    path = build_checkpoint(family, variant=VARIANTS.get(family, ""))
    with running_cluster(path, tmp_path, "--served-model-name", family, *EVERYTHING) as cluster:
        await assert_family_exact(cluster, family, path)
        assert cluster.total("pd", "triptych_pd_ranks") == 2
        assert cluster.total("encoder", "triptych_encoder_ranks") == 2
        assert cluster.total("pd", "triptych_pd_graph_steps_total") > 0
        assert cluster.total("encoder", "triptych_encoder_graph_misses_total") == 0
        await asyncio.to_thread(assert_at_rest, cluster)
