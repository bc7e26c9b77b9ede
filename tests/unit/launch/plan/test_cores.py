"""Cores, and whether a cluster fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.apps.launch.plan.cores import assign_cores, proxy_cores, share_cores
from triptych.apps.launch.plan.memory import (
    WORKER_BASE_BYTES,
    MemoryPlan,
    check_fits,
    plan_memory,
    weight_bytes,
)
from triptych.base.config import ClusterConfig, ServeConfig, WorkerRange
from triptych.base.config.flags import config_from
from triptych.base.errors import ConfigError


def test_too_few_cores_are_an_error_that_counts_them_and_names_the_flag():
    with pytest.raises(ConfigError, match="--cpus-per-worker 2 needs 6 cores for 3 workers and 4 are there"):
        assign_cores(range(4), 3, 2)


def test_the_proxy_leaves_the_last_cores_to_the_pd_workers_and_keeps_one():
    assert proxy_cores({0, 1}, 1) == "0"
    assert proxy_cores({3, 1, 2, 5}, 2) == "1,2"
    assert proxy_cores({4, 6}, 5) == "4"
    assert proxy_cores({7}, 1) == ""


@pytest.mark.parametrize(
    ("flags", "cores", "chosen"),
    [
        ({}, 2, ("pace", 2, 1)),
        ({}, 1, ("pace", 1, 1)),
        ({}, 16, ("pace", 4, 4)),
        ({"encoders": WorkerRange.fixed(1)}, 8, ("pace", 1, 4)),
        ({"encoder_data_parallel": 2}, 16, ("pace", 2, 8)),
        ({"encoder_data_parallel": 8}, 2, ("pace", 1, 1)),
        ({"encoders": WorkerRange.fixed(3), "encoder_threads": 2}, 8, ("pace", 3, 2)),
        ({"encoders": WorkerRange(0, 8)}, 8, ("pace", 8, 1)),
        ({"encoders": WorkerRange(0, 3), "cpu_sharing": "free"}, 8, ("free", 3, 0)),
        ({"threads": 1}, 8, ("pace", 4, 1)),
        ({"cpu_sharing": "pace", "cpus_per_worker": 1}, 8, ("pace", 4, 2)),
        ({"cpu_sharing": "free"}, 8, ("free", 1, 0)),
        ({"cpus_per_worker": 1}, 8, ("free", 1, 0)),
        ({"device": "cuda"}, 8, ("free", 1, 0)),
        ({"topology": "colocated"}, 8, ("free", 1, 0)),
    ],
)
def test_what_the_flags_leave_open_is_chosen_for_the_cores_of_the_machine(flags, cores, chosen):
    found = share_cores(config_from(ServeConfig, flags), cores)
    assert (found.cpu_sharing, found.encoders.maximum, found.encoder_threads) == chosen
    given = flags.get("encoders")
    assert found.encoders == (given or WorkerRange.fixed(chosen[1]))


def test_cores_of_one_worker_are_of_one_node_as_long_as_there_are_such():
    nodes = [{0, 2, 4}, {1, 3, 5}]
    assert assign_cores(range(6), 3, 2, nodes=nodes) == ["0,2", "1,3", "4,5"]
    assert assign_cores({0, 1, 2, 3}, 2, 2, nodes=nodes) == ["0,2", "1,3"]
    assert assign_cores({6, 7, 1}, 1, 2, nodes=nodes) == ["1,6"]


def test_pinned_cores_are_no_more_than_a_quota_pays_for():
    assert assign_cores(range(64), 2, 2, quota=4.5) == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="needs 6 cores for 3 workers and 4 are there"):
        assign_cores(range(64), 3, 2, quota=4.5)


def test_a_plan_that_fits_is_accepted():
    check_fits(MemoryPlan((("a", 1), ("b", 2))), 3)
    with pytest.raises(ConfigError, match="needs 3 B"):
        check_fits(MemoryPlan((("a", 1), ("b", 2))), 2)


def test_a_broken_weight_file_is_told(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="fetch the checkpoint again"):
        weight_bytes(tmp_path, "float32")


@pytest.mark.parametrize(("topology", "more"), [("epd", 2 * 3), ("colocated", 3)])
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
