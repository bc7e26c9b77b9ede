"""Ray actors: which are desired, started and drained, and where they listen."""

from __future__ import annotations

import socket

import pytest

from triptych.apps.launch.children import Child
from triptych.apps.launch.ray import actor
from triptych.apps.launch.ray.actor import ServiceActor, free_port_in, is_free, last_error, listen_at
from triptych.apps.launch.ray.pools import ActorPool, PoolResources
from triptych.apps.launch.ray.supervisor import ActorChanges, DesiredActors, find_changes
from triptych.apps.launch.scaling import plan_change
from triptych.base.config import WorkerRange


def test_a_worker_listens_on_all_interfaces_and_names_its_node():
    words, address = listen_at("10.0.0.7", 20001)
    assert words == ["--host", "0.0.0.0", "--port", "20001", "--advertise", "10.0.0.7:20001"]
    assert address == "10.0.0.7:20001"


def test_a_free_port_is_one_of_the_range_that_nothing_listens_at():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not is_free(port)
        with pytest.raises(OSError, match=f"no port of {port}-{port} is free"):
            free_port_in(f"{port}-{port}")
    assert 20000 <= free_port_in("20000-29999") <= 29999


def test_the_reason_is_the_last_that_a_service_said(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "other\ntriptych: the first\n" + "x" * 5000 + "\ntriptych: --store is missing\nTraceback\n"
    )
    assert last_error(log) == "--store is missing"
    log.write_text("nothing of ours\n")
    assert last_error(log) == last_error(tmp_path / "none") == "its log says why"


async def test_an_actor_whose_service_cannot_be_started_has_failed(monkeypatch):
    """Another actor takes its place; one that says that it runs would never be missed."""

    class NoRoom(Child):
        async def watch(self) -> int:
            raise OSError("no port of 1-2 is free on this node")

    monkeypatch.setattr(actor, "node_address", lambda: "10.0.0.7")
    monkeypatch.setattr(actor, "Child", NoRoom)
    monkeypatch.setattr(actor, "raise_priority", lambda: None)
    monkeypatch.setattr(actor, "setup_logging", lambda *_, **__: None)
    service = ServiceActor("pd-0", ["pd"], "", 1)
    await service.drain()
    health = await service.health()
    assert (health["state"], health["pid"]) == ("failed", 0)
    assert health["message"] == "could not be started: no port of 1-2 is free on this node"


def test_the_reason_is_found_in_a_log_of_json_too(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        '{"level": "info", "logger": "launch", "message": "starting"}\n'
        '{"level": "critical", "logger": "triptych", "message": "--store is missing"}\n'
        '{"level": "info", "logger": "launch", "message": "stopped"}\n'
        "{half of a line\n"
    )
    assert last_error(log) == "--store is missing"


ENCODERS = ActorPool("encoder", ("encoder",), WorkerRange(1, 4), PoolResources())
PD = ActorPool("pd", ("pd",), WorkerRange.fixed(2), PoolResources())
POOLS = {"encoder": ENCODERS, "pd": PD}
ALL = ("encoder-0", "pd-0", "pd-1")


def test_a_fresh_cluster_asks_for_the_groups_of_what_it_always_has():
    changes = find_changes(POOLS, ALL, [], [])
    assert changes == ActorChanges(groups=(("encoder", "encoder"), ("pd", "pd")), start=ALL)


def test_a_worker_above_the_least_has_a_placement_group_of_its_own():
    changes = find_changes(POOLS, (*ALL, "encoder-1", "encoder-2"), ALL, ["encoder", "pd"])
    assert changes.groups == (("encoder", "encoder-1"), ("encoder", "encoder-2"))
    assert changes.start == ("encoder-1", "encoder-2")
    assert changes.drain == changes.remove == ()


def test_a_group_is_given_back_when_its_worker_has_drained_and_ended():
    names, groups = (*ALL, "encoder-1", "encoder-2"), ["encoder", "pd", "encoder-1", "encoder-2"]
    wanted = names[:-1]
    assert find_changes(POOLS, wanted, names, groups) == ActorChanges(drain=("encoder-2",))
    # It drains, and then is gone.
    assert find_changes(POOLS, wanted, names, groups, ["encoder-2"]) == ActorChanges()
    assert find_changes(POOLS, wanted, wanted, groups) == ActorChanges(remove=("encoder-2",))


def test_an_actor_and_a_group_that_are_gone_are_asked_for_again():
    changes = find_changes(POOLS, ALL, ["pd-0"], ["encoder"])
    assert changes == ActorChanges(groups=(("pd", "pd"),), start=("encoder-0", "pd-1"))


def test_an_actor_of_a_pool_that_is_not_planned_is_drained_with_its_group():
    names, groups = (*ALL, "colocated-0"), ["encoder", "pd", "colocated-0"]
    assert find_changes(POOLS, ALL, names, groups).drain == ("colocated-0",)
    assert find_changes(POOLS, ALL, ALL, groups).remove == ("colocated-0",)


def _follow(actors: DesiredActors, count: int) -> None:
    change = plan_change(actors.workers("encoder"), count)
    for name in change.start:
        actors.start(name)
    for name in change.drain:
        actors.drain(name)


def test_the_number_goes_up_and_down_and_the_first_ones_stay():
    actors = DesiredActors(POOLS)
    _follow(actors, 4)
    assert actors.names == ["encoder-0", "encoder-1", "encoder-2", "encoder-3", "pd-0", "pd-1"]
    _follow(actors, 2)
    assert actors.names == ["encoder-0", "encoder-1", "pd-0", "pd-1"]
    _follow(actors, 1)
    assert actors.names == ["encoder-0", "pd-0", "pd-1"]


def test_a_name_that_drains_is_not_taken_for_another_one():
    draining: list[str] = []
    actors = DesiredActors(POOLS, lambda: draining)
    _follow(actors, 2)
    _follow(actors, 1)
    draining.append("encoder-1")
    _follow(actors, 2)
    assert "encoder-2" in actors.names and "encoder-1" not in actors.names


def test_adopted_actors_are_kept_as_far_as_the_pool_may_have_them():
    actors = DesiredActors(POOLS)
    actors.keep({"encoder-3", "encoder-0", "encoder-7", "pd-1"})
    assert actors.names == ["encoder-0", "encoder-3", "pd-0", "pd-1"]
