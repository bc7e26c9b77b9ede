"""asyncio in virtual time, queues by deadline as the proxy's, and replicas that encode inside the step."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from support.simulated import COSTS, MIX, PICTURE, run
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.encoders.fair_turns import FairTurns
from triptych_bench.goodput.load.workload import Picture, PlannedRequest
from triptych_bench.simulator.cluster.context import Simulation
from triptych_bench.simulator.cluster.loop import VirtualLoop
from triptych_bench.simulator.cluster.proxy import SimulatedProxy
from triptych_bench.simulator.cluster.requests import SimulatedRequest
from triptych_bench.simulator.cluster.shape import ClusterShape, colocated, in_step, on_devices


def test_sleeps_and_timeouts_of_tasks_take_no_time_but_virtual_one() -> None:
    loop, seen = VirtualLoop(), list[tuple[str, float]]()

    async def work(name: str, seconds: float) -> None:
        try:
            async with asyncio.timeout(3600.0):
                await asyncio.sleep(seconds)
                seen.append((name, asyncio.get_running_loop().time()))
        except TimeoutError:
            seen.append((f"{name} late", asyncio.get_running_loop().time()))

    tasks = [loop.create_task(work("quick", 60.0)), loop.create_task(work("slow", 7200.0))]
    loop.run()
    assert all(task.done() for task in tasks)
    assert seen == [("quick", 60.0), ("slow late", 3600.0)]


def test_an_unhandled_error_ends_the_run() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    loop = VirtualLoop()
    loop.create_task(fail())
    with pytest.raises(ValueError, match="broken"):
        loop.run()


SLOW = replace(COSTS, encoder=replace(COSTS.encoder, tower_batch=0.5))


def burst(load: object = PICTURE) -> Simulation:
    return run(on_devices(1, 1), load, rate=200, count=60, costs=SLOW)


def test_one_timeout_for_all_leaves_every_request_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    by_slack = [burst(load) for load in (PICTURE, MIX)]
    monkeypatch.setattr(FairTurns, "hurry", lambda *arguments: [])
    assert by_slack == [burst(load) for load in (PICTURE, MIX)]


def test_a_request_with_a_short_timeout_is_answered_before_earlier_ones(monkeypatch):
    patient = burst().records[-1].ttft
    call_of = SimulatedProxy._call

    def call(proxy: SimulatedProxy, request: SimulatedRequest) -> ChatCall:
        made = call_of(proxy, request)
        return replace(made, timeout=60.0) if request.index == 59 else made

    monkeypatch.setattr(SimulatedProxy, "_call", call)
    last = next(record for record in burst().records if record.index == 59)
    assert last.ok and last.ttft < patient / 2


PATCHES = 400
TOWER = COSTS.encoder.tower(1, PATCHES)


def request(seed: int, output_tokens: int = 1, picture: int | None = None) -> PlannedRequest:
    shown = (Picture(picture, 320, 320),) if picture is not None else ()
    return PlannedRequest(seed, 50, output_tokens, shown)


def test_a_step_that_reaches_a_picture_lasts_as_long_as_its_tower_besides() -> None:
    free = replace(COSTS, encoder=replace(COSTS.encoder, tower_batch=0, tower_item=0, tower_patch=0))
    with_tower, without = (
        run(in_step(1), [request(1, picture=1)], [0.0], costs=costs).records[0].ttft
        for costs in (COSTS, free)
    )
    assert with_tower - without == pytest.approx(TOWER)


@pytest.mark.parametrize("shape", [in_step(3), colocated(3)])
def test_nothing_is_left_of_replicas_of_either_kind(shape: ClusterShape) -> None:
    load = [request(seed, 5, picture=seed % 7) for seed in range(60)]
    found = run(shape, load, [0.01 * index for index in range(60)])
    assert all(record.ok for record in found.records) and not any(found.leftovers.values())
