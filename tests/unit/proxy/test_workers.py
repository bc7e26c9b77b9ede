"""Which workers get what: all that serve, those that are well, and those that reach the store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.base.types import WorkerInfo
from triptych.proxy.admission import MIN_LOSSES, WINDOW_SECONDS, Backpressure
from triptych.proxy.pool import LEAVE_SECONDS, POLL_SECONDS, leaves_readiness, poll_interval
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


def test_an_encoder_alone_makes_no_model() -> None:
    workers = KnownWorkers()
    encoder = WorkerInfo("e:1", "encoder", "i", "key", "model", ("space",))
    workers.declare(encoder)
    assert not workers.models()
    workers.declare(replace(encoder, pool="pd", address="p:1", namespaces=(), capacity={"pools": 1}))
    workers.declare(encoder)
    assert workers.kind("model").pools


def test_media_of_two_models_with_one_tower_are_bound_to_one_namespace() -> None:
    workers, tower = KnownWorkers(), "d" * 32
    base = WorkerInfo("p:1", "pd", "i", "base key", "base", (tower + "0" * 32,))
    tuned = replace(base, address="p:2", model_key="tuned key", model="tuned")
    other = replace(base, address="p:3", model_key="other key", model="other", namespaces=("c" * 64,))
    encoder = replace(base, address="e:1", pool="encoder", namespaces=(tower + "1" * 32,))
    for info in (base, tuned, other, encoder):
        workers.workers[info.pool, info.address] = Worker(info)
        workers.declare(info)
    assert not workers.match_encoders()
    assert [workers.namespace(key) for key in ("base key", "tuned key")] == [tower + "1" * 32] * 2
    # PD workers' own name no encoder.
    assert workers.namespace("other key") is None


def test_while_a_release_is_rolled_each_key_goes_on_with_the_encoders_that_are_there() -> None:
    """Encoders of the release before write a namespace of their own, which no tower is read from."""
    workers = KnownWorkers()
    pd = WorkerInfo("p:1", "pd", "i", "key", "model", ("d" * 64,))
    old = replace(pd, address="e:1", pool="encoder", namespaces=("b" * 64,))
    new = replace(old, address="e:2", namespaces=("d" * 64,))
    for info in (pd, old):
        workers.workers[info.pool, info.address] = Worker(info)
        workers.declare(info)
    assert workers.namespace("key") == "b" * 64
    workers.workers["encoder", "e:2"] = Worker(new)
    workers.declare(new)
    assert workers.namespace("key") == "d" * 64
    workers.workers["encoder", "e:2"].alive = False
    assert workers.namespace("key") == "b" * 64
    assert not workers.match_encoders()


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


@pytest.mark.parametrize(
    ("works", "every", "now", "flow_control", "refused"),
    [
        (5 * MIN_LOSSES, 5, 1.0, True, True),
        (10 * MIN_LOSSES, 10, 1.0, True, False),
        (5 * MIN_LOSSES, 5, WINDOW_SECONDS + 1.0, True, False),
        (MIN_LOSSES - 1, 1, 1.0, True, False),
        (5 * MIN_LOSSES, 5, 1.0, False, False),
    ],
    ids=["a fifth", "a tenth", "before the window", "few", "without flow control"],
)
def test_new_media_are_refused_while_too_much_is_encoded_again(works, every, now, flow_control, refused):
    pressure = Backpressure(flow_control=flow_control)
    for number in range(works):
        pressure.record(1.0, 0.0, re_encode=number % every == 0)
    assert pressure.refuses_media(now) is refused


def test_an_empty_pool_is_looked_at_more_often_than_a_complete_cluster() -> None:
    assert poll_interval(complete=False) < poll_interval(complete=True) == POLL_SECONDS
