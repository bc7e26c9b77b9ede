"""The scaling curve, bottlenecks, prices and advice against figures computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.simulated import COSTS, LIMITS, MODEL
from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.workload import Workload
from triptych_bench.goodput.measure.slo import Slo
from triptych_bench.simulator.cluster.shape import colocated, in_step, on_devices
from triptych_bench.simulator.costs.costs import CostModel, EncoderCosts
from triptych_bench.simulator.plan.estimate import Estimate
from triptych_bench.simulator.plan.question import PlannedDevice, Question, parse_prices
from triptych_bench.simulator.plan.ratios import Ratios, Served, advise, candidates
from triptych_bench.simulator.plan.scaling import (
    SHARE,
    Traffic,
    bottlenecks,
    proxies_needed,
    proxy_share,
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


OBJECTIVES = Slo((("ttft", 2000.0), ("tpot", 50.0)))
LOAD = Workload(50, 10, ((1, 1.0),), ((320, 320, 1.0),))


def device(name: str, tower: float, hour: float | None, costs: CostModel = COSTS) -> PlannedDevice:
    encoder = EncoderCosts(0.0, 0.0, 0.0, tower, 0.0, 0.0, 0.0)
    return PlannedDevice(name, replace(costs, name=name, encoder=encoder), MODEL, LIMITS, hour)


def question(budget: float = 4.0, **changes: object) -> Question:
    """An encoder at 0.5 dollars takes 40 ms a picture; PD workers at 2 dollars would take 10."""
    asked = Question(
        LOAD,
        "by hand",
        OBJECTIVES,
        device("large", 0.01, 2.0),
        repeats=1,
        encoder_device=device("small", 0.04, 0.5),
        budget=budget,
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


def test_a_budget_buys_encoders_of_what_pd_workers_leave() -> None:
    found = [shape.name for shape in candidates(question(6.0), pictures=True)]
    # 2 of 6 dollars leave 8 encoders, 4 leave 4; with three PD workers nothing is left.
    assert found == ["8E1PD", "4E2PD"]
    assert [shape.name for shape in candidates(question(6.0), pictures=False)] == ["0E3PD"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a100=much", "write 1.5"),
        ("a100=1", "leaves out b60"),
        ("1,l4=2", "names l4"),
        ("a100=1,b60=1,a100=2", "a100 twice"),
    ],
)
def test_prices_that_do_not_fit_the_devices_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--price.*{said}"):
        parse_prices(text, ("a100", "b60"))


def ratios(apart: float, replicas: float, step: float, encoders: int = 1) -> Ratios:
    return Ratios(
        (Served(on_devices(encoders, 3), 100.0, (apart,)),),
        Served(colocated(4), 100.0, (replicas,)),
        Served(in_step(4), 100.0, (step,)),
    )


#: One encoder could serve 40, three PD workers 12.
UNEQUAL = Estimate(encoder=40, pd_worker=4, replica=3.5, step=0.01, work=0.1)


@pytest.mark.parametrize(
    ("rates", "verdict", "words"),
    [
        (
            (10.0, 12.0, 9.0),
            False,
            "4 colocated serves 1.20x of 1E3PD. The PD workers are its limit; its enco",
        ),
        ((10.0, 9.0, 12.0), False, "4 in-step serves 1.20x of 1E3PD"),
        ((12.0, 10.0, 8.0), True, "Disaggregate: 1E3PD serves 1.20x of 4 colocated"),
        ((10.0, 9.8, 9.0), None, "cannot tell less than 6%"),
        ((0.0, 9.0, 9.0), False, "only 4 colocated serves"),
        ((9.0, 0.0, 0.0), True, "only 1E3PD serves"),
        ((0.0, 0.0, 0.0), None, "Nothing serves"),
    ],
)
def test_advice_compares_with_the_better_replicas_and_says_why(rates, verdict, words):
    found = advise(ratios(*rates), UNEQUAL)
    assert found.disaggregate is verdict
    assert words in found.reason
    if verdict is False and rates[0]:
        assert "encoders are at 25% of what they could serve" in found.reason
