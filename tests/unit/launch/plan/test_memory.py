"""Whether a cluster fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.apps.launch.plan.memory import (
    WORKER_BASE_BYTES,
    MemoryPlan,
    check_fits,
    plan_memory,
    weight_bytes,
)
from triptych.base.config import ClusterConfig, WorkerRange
from triptych.base.config.flags import config_from
from triptych.base.errors import ConfigError


def test_a_plan_that_fits_is_accepted():
    check_fits(MemoryPlan((("a", 1), ("b", 2))), 3)
    with pytest.raises(ConfigError, match="needs 3 B"):
        check_fits(MemoryPlan((("a", 1), ("b", 2))), 2)


def test_a_broken_weight_file_is_told(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="fetch the checkpoint again"):
        weight_bytes(tmp_path, "float32")


@pytest.mark.parametrize(("topology", "more"), [("epd", 2 * 3), ("colocated", 0)])
def test_every_rank_of_a_tower_counts_as_a_process_with_all_weights(topology: str, more: int):
    given = {"topology": topology, "encoders": WorkerRange.fixed(2)}
    one, four = (
        plan_memory(1000, config_from(ClusterConfig, {**given, "encoder_data_parallel": ranks}))
        for ranks in (1, 4)
    )
    assert four.total - one.total == more * (WORKER_BASE_BYTES + 1000)


def test_ranks_of_a_decoder_share_its_weights_and_have_embeddings_of_their_own() -> None:
    given = {"encoders": WorkerRange.fixed(1), "pd_workers": WorkerRange.fixed(2), "encoder_cache_memory": 70}
    one, three = (
        plan_memory(1000, config_from(ClusterConfig, {**given, "tensor_parallel": ranks})) for ranks in (1, 3)
    )
    assert three.total - one.total == 4 * (WORKER_BASE_BYTES + 70)
    assert "6 PD workers or ranks" in three.table()
