"""What is started, drained and given back on the way to the actors that are wanted."""

from __future__ import annotations

from triptych.apps.launch.ray.pools import ActorPool, PoolResources
from triptych.apps.launch.ray.supervisor import ActorChanges, find_changes
from triptych.base.config import WorkerRange

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
