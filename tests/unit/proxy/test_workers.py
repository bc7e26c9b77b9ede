"""Which workers get what: all that serve, those that are well, and those that reach the store."""

from __future__ import annotations

import pytest

from triptych.base.types import WorkerInfo
from triptych.proxy.pool import LEAVE_SECONDS, leaves_readiness
from triptych.proxy.workers import KnownWorkers, Worker


def known(**states: dict[str, bool]) -> KnownWorkers:
    """Encoders by name, in these states."""
    workers = KnownWorkers()
    for name, state in states.items():
        info = WorkerInfo(name, "encoder", "i", "key", "model", ("space",))
        workers.workers["encoder", name] = Worker(info, **state)
    return workers


def names(workers: list[Worker]) -> list[str]:
    return [worker.info.address for worker in workers]


def test_a_silent_worker_gets_nothing_and_gives_up_what_it_has_where_another_is_well() -> None:
    workers = known(a={"silent": True}, b={})
    assert names(workers.serving("encoder")) == ["a", "b"]
    assert names(workers.well("encoder")) == ["b"]
    assert workers.silent("encoder") == ["a"]


def test_where_all_are_silent_they_keep_what_they_have() -> None:
    workers = known(a={"silent": True}, b={"silent": True}, c={"alive": False})
    assert names(workers.well("encoder")) == ["a", "b"]
    assert workers.silent("encoder") == []


def test_the_store_is_lost_to_a_pool_when_none_of_its_workers_reaches_it() -> None:
    assert not known().store_lost("encoder")
    assert not known(a={"reaches_store": False}, b={}).store_lost("encoder")
    lost = known(a={"reaches_store": False}, b={"serving": False})
    assert lost.store_lost("encoder")
    assert not lost.store_lost("pd")
    assert lost.namespaces_served() == frozenset()


@pytest.mark.parametrize(
    ("silent", "proxies", "others_reach", "leaves"),
    [
        (LEAVE_SECONDS, 2, True, True),
        (LEAVE_SECONDS / 2, 2, True, False),
        (LEAVE_SECONDS, 1, True, False),
        (LEAVE_SECONDS, 2, False, False),
    ],
)
def test_a_proxy_leaves_when_it_alone_lacks_the_store_for_long_and_another_is_there(
    silent: float, proxies: int, others_reach: bool, leaves: bool
) -> None:
    assert leaves_readiness(silent, proxies, others_reach=others_reach) is leaves
