"""Which actors are meant to live while scaling changes their number."""

from __future__ import annotations

from triptych.apps.launch.ray.pools import ActorPool, PoolResources
from triptych.apps.launch.ray.supervisor import DesiredActors
from triptych.apps.launch.scaling import plan_change
from triptych.base.config import WorkerRange

ENCODERS = ActorPool("encoder", ("encoder",), WorkerRange(1, 4), PoolResources())
PD = ActorPool("pd", ("pd",), WorkerRange.fixed(2), PoolResources())
POOLS = {"encoder": ENCODERS, "pd": PD}


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
