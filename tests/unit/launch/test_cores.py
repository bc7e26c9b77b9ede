"""Cores for the workers of one machine."""

from __future__ import annotations

import pytest

from triptych.errors import ConfigError
from triptych.launch.cores import assign_cores, check_sharing


def test_each_worker_gets_cores_of_its_own():
    assert assign_cores({7, 2, 3, 5, 4}, 2, 2) == ["2,3", "4,5"]
    assert assign_cores({0}, 3, 0) == ["", "", ""]


def test_too_few_cores_are_an_error_that_counts_them_and_names_the_flag():
    with pytest.raises(ConfigError, match="--cpus-per-worker 2 needs 6 cores for 3 workers and 4 are there"):
        assign_cores(range(4), 3, 2)


def test_workers_that_share_no_cores_cannot_give_way():
    with pytest.raises(ConfigError, match="--cpus-per-worker"):
        check_sharing("turn", cpus_per_worker=1, topology="epd")
    with pytest.raises(ConfigError, match="--topology epd"):
        check_sharing("nice", cpus_per_worker=0, topology="colocated")
    check_sharing("free", cpus_per_worker=1, topology="colocated")
