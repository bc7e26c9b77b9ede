"""The scaling curve and its bottlenecks, against shares computed by hand."""

from __future__ import annotations

from dataclasses import replace

from support.simulated import COSTS, LIMITS, MODEL
from triptych.goodput.load.workload import Workload
from triptych.goodput.measure.slo import Slo
from triptych.simulator.cluster.shape import on_devices
from triptych.simulator.costs.costs import ProxyCosts
from triptych.simulator.plan.estimate import Estimate
from triptych.simulator.plan.question import PlannedDevice, Question
from triptych.simulator.plan.ratios import Served
from triptych.simulator.plan.scaling import (
    SHARE,
    Traffic,
    bottlenecks,
    proxies_needed,
    proxy_share,
    traffic_of,
)

SLO = Slo((("tpot", 1000.0),))
#: A PD worker serves 10 requests per second, an encoder as many.
FOUND = Estimate(encoder=10, pd_worker=10, replica=5, step=0.01, work=0.05)
#: 2 ms of a proxy and no messages; 10 MB saved and 20 loaded at 1 GB/s.
PLAIN = Traffic(2e-3, 0.0, 100, 10e6, 20e6, 50, save_rate=1e9, load_rate=1e9)


def test_proxies_are_the_fewest_within_their_share() -> None:
    for rate in (1, 300, 351, 10_000):
        for traffic in (PLAIN, replace(PLAIN, message=1e-4)):
            count = proxies_needed(traffic, rate, 20)
            assert proxy_share(traffic, rate, 20, count) <= SHARE
            assert count == 1 or proxy_share(traffic, rate, 20, count - 1) > SHARE
    # Looking at so many workers takes all of it, however many proxies there are.
    assert proxies_needed(PLAIN, 1, 60_000) == 0


def test_bottlenecks_come_in_the_order_in_which_they_are_met() -> None:
    # N workers serve 5 N: the store is full at 0.7 / 0.03 = 23.3/s, a proxy at 350/s but for its looks.
    found = bottlenecks(FOUND, 1.0, PLAIN)
    assert [one.part for one in found] == ["store", "proxy", "registry"]
    assert found[0].workers == 6 and found[0].rate == 30
    assert found[1].workers is not None and 69 <= found[1].workers <= 70
    assert found[2].workers is None or found[2].workers > 400


def test_texts_never_fill_the_store() -> None:
    texts = replace(PLAIN, saved=0.0, loaded=0.0)
    by_part = {one.part: one for one in bottlenecks(FOUND, 1.0, texts, 300)}
    assert by_part["store"].workers is None
    assert by_part["proxy"].workers is not None


def traffic(token: float) -> Traffic:
    """Of two pictures and 100 tokens out; a proxy takes 5 ms for a request, its tokens at `token` each."""
    load = Workload(50, 100, ((2, 1.0),), ((320, 320, 1.0),), 0.5)
    costs = replace(COSTS, proxy=ProxyCosts(5e-3 - 100 * token, 0.0, token))
    asked = Question(load, "", SLO, PlannedDevice("", costs, MODEL, LIMITS))
    served = Served(on_devices(1, 1), 10.0, (4.0,))
    return traffic_of(asked, replace(FOUND, step=0.1, work=0.05), served)
