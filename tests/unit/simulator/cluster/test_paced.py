"""Decoders that keep their steps apart while towers lack cores, in virtual time."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from support.simulated import COSTS, LIMITS, MODEL, PICTURE, TEXT, run
from triptych.goodput.load.workload import Workload, plan_requests
from triptych.simulator.cluster.cores import SharedCores
from triptych.simulator.cluster.shape import ClusterShape, paced, pinned, shared
from triptych.simulator.costs.costs import ClientCosts, CoreCosts
from triptych.simulator.run import simulate


def test_a_page_tells_who_lacks_cores_and_whoever_watches() -> None:
    page, seen = SharedCores(2), []
    page.watch("pd", lambda: seen.append(page.crowded("pd", 1)))
    page.begin("a", 1)
    page.begin("b", 1)
    page.begin("pd", 1)
    page.end("b")
    assert seen == [False, True, False]
    page.watch("pd", None)
    page.end("a")
    assert len(seen) == 3
    assert not SharedCores(float("inf")).crowded("pd", 9)


def test_steps_rest_while_towers_lack_cores_and_only_then() -> None:
    # One long text; two pictures begin to be encoded meanwhile, one core for each tower.
    load = [*plan_requests(TEXT, 1, 0), *plan_requests(PICTURE, 2, 1)]
    times = [0.0, 0.05, 0.05]
    costs = replace(COSTS, encoder=replace(COSTS.encoder, tower_batch=0.2))
    free = simulate(load, times, shared(2, 1, cores=2), costs, MODEL, LIMITS)
    rest = simulate(load, times, paced(2, 1, cores=2), costs, MODEL, LIMITS)
    assert not any(found.records[0].error for found in (free, rest))
    longest = max(rest.records[0].itls)
    interval = 0.02
    assert longest == pytest.approx(interval, rel=0.6) and longest > max(free.records[0].itls)
    assert min(rest.records[0].itls) == pytest.approx(min(free.records[0].itls), rel=0.05)
    assert set(rest.leftovers.values()) == {0}


def test_nothing_is_paced_without_pictures() -> None:
    assert run(paced(2, 1, cores=2), TEXT).records == run(shared(2, 1, cores=2), TEXT).records


def test_steps_are_shorter_on_a_core_of_their_own() -> None:
    def tpot(shape: ClusterShape) -> float:
        return statistics.median(one.tpot for one in run(shape, TEXT, rate=2.0).records)

    assert tpot(pinned(1, 1, own_core=0.5)) == pytest.approx(0.5 * tpot(pinned(1, 1)), rel=0.05)
    assert tpot(paced(2, 1, cores=2, own_core=0.5)) == pytest.approx(
        0.5 * tpot(paced(2, 1, cores=2)), rel=0.05
    )


def test_a_paced_worker_has_no_core_of_its_own_while_a_tower_computes() -> None:
    # One long text; a picture that is encoded from 50 to 250 ms, for which there is a core.
    load = [*plan_requests(Workload(100, 60), 1, 0), *plan_requests(PICTURE, 1, 1)]
    costs = replace(COSTS, encoder=replace(COSTS.encoder, tower_batch=0.2))
    found = simulate(load, [0.0, 0.05], paced(2, 1, cores=2, own_core=0.5), costs, MODEL, LIMITS)
    alone = simulate(load[:1], [0.0], paced(2, 1, cores=2, own_core=0.5), costs, MODEL, LIMITS)
    itls, quick = found.records[0].itls, alone.records[0].itls
    assert min(itls) == pytest.approx(min(quick), rel=0.05)
    assert sum(gap > 1.8 * min(quick) for gap in itls) >= 10 > sum(gap > 1.8 * min(quick) for gap in quick)


@pytest.mark.parametrize("shape", [shared(1, 2, cores=2), paced(2, 1, cores=2)], ids=lambda shape: shape.name)
def test_messages_wake_ups_and_the_client_cost_time_and_lose_nothing(shape: ClusterShape) -> None:
    dear = replace(
        COSTS,
        pd=replace(COSTS.pd, message=5e-4, message_token=5e-5, take_busy=2e-3),
        proxy=replace(COSTS.proxy, message=3e-4),
        client=ClientCosts(1e-3, 2e-4, 1e-5),
        cores=CoreCosts(wake=5e-4, nice_weight=0.5),
    )
    cheap, found = (run(shape, PICTURE, costs=costs, rate=8.0) for costs in (COSTS, dear))
    assert all(record.ok for record in found.records)
    assert set(found.leftovers.values()) == {0}
    assert sum(one.e2e for one in found.records) > sum(one.e2e for one in cheap.records)
    assert all(gap >= 0 for one in found.records for gap in one.itls)
    assert found.counters.utilisation["proxy"] > cheap.counters.utilisation["proxy"]
    assert run(shape, PICTURE, costs=dear, rate=8.0).records == found.records
