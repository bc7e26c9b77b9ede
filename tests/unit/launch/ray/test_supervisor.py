"""Actors are adopted, started, drained and removed as they should, on a Ray that is only remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from triptych.apps.launch.ray.actor import ActorState
from triptych.apps.launch.ray.connection import ActorGone, ActorGroup, frozen
from triptych.apps.launch.ray.pools import ActorPool, PoolResources
from triptych.apps.launch.ray.supervisor import ActorSupervisor
from triptych.base.config import WorkerRange
from triptych.base.errors import ConfigError

ENCODERS = ActorPool("encoder", ("encoder", "--new"), WorkerRange(1, 3), PoolResources())
PROXIES = ActorPool("proxy", ("proxy",), WorkerRange.fixed(1), PoolResources(), port=8000, grpc_port=8001)
POOLS = {"encoder": ENCODERS, "proxy": PROXIES}


@dataclass
class RememberedRay:
    """What `RayActors` would have done, in order."""

    commands: dict[str, list[str]] = field(default_factory=dict)
    held: dict[str, ActorGroup] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    owner: str = ""
    silent: set[str] = field(default_factory=set)

    def claim(self) -> bool:
        return not self.owner

    def claimed_by(self) -> str:
        return self.owner

    def names(self) -> set[str]:
        return set(self.commands)

    def groups(self) -> dict[str, ActorGroup]:
        return dict(self.held)

    def start(self, pool: ActorPool, name: str) -> None:
        if pool.group(name) not in self.held or name in self.commands:
            raise ValueError(name)
        self.done.append(f"start {name}")
        self.commands[name] = pool.command_of(name)

    def states(self, names: Collection[str]) -> dict[str, ActorState]:
        return {}

    def command(self, name: str) -> list[str]:
        if name in self.silent:
            raise ActorGone(name)
        return self.commands[name]

    def drain(self, name: str, seconds: float) -> None:
        if name in self.silent:
            raise ActorGone(name)
        self.done.append(f"drain {name}")

    def kill(self, name: str) -> None:
        self.done.append(f"kill {name}")
        self.commands.pop(name, None)

    def create_group(self, pool: ActorPool, group: str) -> None:
        self.done.append(f"room {group}")
        self.held[group] = ActorGroup(frozen(pool.bundles(group)), pool.resources.strategy, True)

    def remove_group(self, group: str) -> None:
        self.done.append(f"return {group}")
        self.held.pop(group, None)


def _supervisor(ray: RememberedRay) -> ActorSupervisor:
    return ActorSupervisor(ray, POOLS)  # type: ignore[arg-type]


async def _settled(supervisor: ActorSupervisor, wanted: Collection[str]) -> None:
    for _ in range(3):
        await supervisor.reconcile(wanted)
        while supervisor.draining:
            await asyncio.sleep(0.01)


async def test_one_that_is_not_wanted_is_drained_killed_and_its_room_returned():
    ray = RememberedRay()
    supervisor = _supervisor(ray)
    await _settled(supervisor, ["encoder-0", "encoder-1", "proxy-0"])
    ray.done.clear()
    await _settled(supervisor, ["encoder-0", "proxy-0"])
    assert ray.done == ["drain encoder-1", "kill encoder-1", "return encoder-1"]


async def test_what_others_have_ended_comes_again():
    ray = RememberedRay()
    supervisor = _supervisor(ray)
    await _settled(supervisor, ["encoder-0", "proxy-0"])
    del ray.commands["encoder-0"], ray.held["encoder"]
    ray.done.clear()
    await _settled(supervisor, ["encoder-0", "proxy-0"])
    assert ray.done == ["room encoder", "start encoder-0"]


async def test_actors_with_the_same_words_and_room_are_adopted():
    ray = RememberedRay()
    await _settled(_supervisor(ray), ["encoder-0", "encoder-2", "proxy-0"])
    ray.done.clear()
    assert await _supervisor(ray).adopt() == {"encoder-0", "encoder-2", "proxy-0"}
    assert ray.done == []


@pytest.mark.parametrize("difference", ["words", "bundles", "strategy", "silence"])
async def test_actors_that_differ_are_drained_and_removed_with_their_room(difference: str):
    ray = RememberedRay()
    await _settled(_supervisor(ray), ["encoder-0", "proxy-0"])
    group = ray.held["encoder"]
    if difference == "words":
        ray.commands["encoder-0"] = ["encoder", "--old"]
    elif difference == "bundles":
        ray.held["encoder"] = ActorGroup(frozen([{"CPU": 2.0}]), group.strategy, True)
    elif difference == "strategy":
        ray.held["encoder"] = ActorGroup(group.bundles, "SPREAD", True)
    else:
        ray.silent = {"encoder-0"}
    ray.done.clear()
    assert await _supervisor(ray).adopt() == {"proxy-0"}
    drained = [] if difference == "silence" else ["drain encoder-0"]
    assert ray.done == [*drained, "kill encoder-0", "return encoder"]


async def test_the_stop_drains_proxies_before_workers_and_leaves_nothing():
    ray = RememberedRay()
    supervisor = _supervisor(ray)
    await _settled(supervisor, ["encoder-0", "encoder-1", "proxy-0"])
    ray.done.clear()
    await supervisor.stop()
    assert ray.done[:2] == ["drain proxy-0", "kill proxy-0"]
    assert (ray.commands, ray.held) == ({}, {})


async def test_one_that_does_not_answer_does_not_hold_the_stop_up():
    ray = RememberedRay(silent={"encoder-0"})
    supervisor = _supervisor(ray)
    await _settled(supervisor, ["encoder-0", "proxy-0"])
    await supervisor.stop()
    assert "kill encoder-0" in ray.done and ray.commands == {}


async def test_one_that_cannot_work_is_not_started_again_at_once():
    ray = RememberedRay()
    supervisor = _supervisor(ray)
    await _settled(supervisor, ["encoder-0", "proxy-0"])
    await supervisor.restart_failed("encoder-0")
    ray.done.clear()
    await _settled(supervisor, ["encoder-0", "proxy-0"])
    assert ray.done == []


async def test_a_cluster_that_another_process_has_is_refused_with_its_name():
    with pytest.raises(ConfigError, match="process 7 on there.*--cluster-name"):
        await _supervisor(RememberedRay(owner="process 7 on there")).claim()
