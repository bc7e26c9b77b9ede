"""Cores for the workers of one machine."""

from __future__ import annotations

import pytest

from triptych.apps.launch.plan.cores import assign_cores, proxy_cores, share_cores
from triptych.base.config import ServeConfig, WorkerRange
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
    assert (found.cpu_sharing, found.encoders.most, found.encoder_threads) == chosen
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
