"""Four A100 in all ways; and unequal devices: up to which price an encoder pays beside a PD device.

A request takes `1/encoder` seconds of an encoder and `1/pd` of a PD worker, or `1/replica` of a replica. At
prices `c` and 1 per hour, apart is cheaper where `c/encoder + 1/pd < 1/replica`, so up to the price

    c = encoder x (1/replica - 1/pd)

of an encoder, in PD devices. By costs alone: waiting and whole numbers of devices are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.result_page import table
from triptych.base.progress import each
from triptych.goodput.load.workload import Workload
from triptych.goodput.measure.slo import Slo, preset
from triptych.simulator.cluster.shape import in_step
from triptych.simulator.plan.answer import CapacityPlan, answer
from triptych.simulator.plan.estimate import estimate
from triptych.simulator.plan.question import Question, read_device
from triptych.simulator.plan.ratios import ALIKE
from triptych.simulator.plan.trials import COARSE, Trials

ENCODERS = ("cpu", "l4", "b60", "l40s", "a100", "h200")
PD_DEVICES = ("l40s", "a100", "h200")
SLO = Slo((("ttft", 2000.0), ("tpot", 50.0)))
LOADS = {
    "4 x 640x640, 400 text": Workload(400, 150, ((4, 1.0),), ((640, 640, 1.0),)),
    "4 x 1080p, 128 text": Workload(128, 128, ((4, 1.0),), ((1920, 1080, 1.0),)),
}


def question(load: Workload, pd: str, encoder: str) -> Question:
    """Prices are the break-even's to find: none is given."""
    device = read_device(pd)
    unequal = read_device(encoder) if encoder != pd else None
    return Question(load, "", SLO, device, encoder_device=unequal, repeats=1)


def price(load: Workload, pd: str, encoder: str) -> float:
    """Of an encoder in PD devices, at which apart and replicas cost the same."""
    bounds = estimate(question(load, pd, encoder))
    if not bounds.replica:
        return math.inf if bounds.pd_worker else math.nan
    return bounds.encoder * (1 / bounds.replica - 1 / bounds.pd_worker)


def price_table() -> list[str]:
    """Rows by load and PD device, columns by encoder device."""
    rows = [
        [name, pd, *(f"{price(load, pd, encoder):.3f}" for encoder in ENCODERS)]
        for name, load in LOADS.items()
        for pd in PD_DEVICES
    ]
    return table(["load", "PD device", *ENCODERS], rows, (0, 1))


CHECKS = (
    ("4 x 640x640, 400 text", "a100", "b60", 2),
    ("4 x 1080p, 128 text", "h200", "b60", 1),
    ("4 x 1080p, 128 text", "a100", "l4", 2),
)


def checks() -> list[str]:
    """Break-even prices by costs next to those of simulated shapes with whole devices: as many encoders as
    keep the PD workers busy, against as many replicas as PD workers.
    """
    rows = []
    for name, pd, encoder, pd_workers in CHECKS:
        load = LOADS[name]
        asked = question(load, pd, encoder)
        bounds, trials = estimate(asked), Trials(asked)
        encoders = max(1, math.ceil(pd_workers * bounds.pd_worker / bounds.encoder))
        rate, replicas = (
            trials.highest(shape, load, fineness=COARSE)
            for shape in (asked.apart(encoders, pd_workers), in_step(pd_workers))
        )
        # The PD devices that replicas would need to serve the difference.
        simulated = pd_workers * (rate / replicas - 1) / encoders if replicas else math.nan
        by_costs, error = f"{price(load, pd, encoder):.3f}", f"{ALIKE - 1:.0%} of a rate"
        rates = f"{rate:.2f}", f"{replicas:.2f}"
        shape = f"{encoders} {encoder} + {pd_workers} {pd}"
        rows.append([name, shape, *rates, by_costs, f"{simulated:.3f} ± {error}"])
    head = ["load", "shape", "requests/s", "replicas of the PD workers, in-step", "price by costs"]
    return table([*head, "simulated"], rows, (0, 1))


GPU, DEVICES = "a100", 4


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    workload: Workload
    ttft: float
    tpot: float


CASES = (
    Case("short-4", preset("short-4").workload, 2000, 50),
    Case("long-4", preset("long-4").workload, 2000, 50),
    Case("long-4", preset("long-4").workload, 2000, 20),
    Case("4 x 1080p", Workload(128, 128, ((4, 1.0),), ((1920, 1080, 1.0),)), 4000, 50),
)


def plans() -> Iterator[tuple[Case, CapacityPlan]]:
    for case in each("cases", CASES):
        slo = Slo((("ttft", case.ttft), ("tpot", case.tpot)))
        asked = Question(case.workload, case.name, slo, read_device(GPU), DEVICES, repeats=1)
        yield case, answer(asked, sensitivity=False)


def equal_table(result: list[tuple[Case, CapacityPlan]]) -> list[str]:
    rows = []
    for case, plan in result:
        best, ratios, gain = plan.ratios.best, plan.ratios, plan.advice.gain
        cells = (
            case.name,
            f"{case.ttft:g}, {case.tpot:g} ms",
            f"{best.name}: {best.rate:.2f}",
            f"{ratios.replicas.rate:.2f}",
            f"{ratios.in_step.rate:.2f}",
            "–" if gain is None else f"{gain:.2f}",
            plan.advice.reason,
        )
        rows.append(cells)
    head = ["load", "P99 TTFT, TPOT", "best ratio", "replicas in turn", "replicas in-step"]
    return table([*head, "apart / better", "advice"], rows, (0, 2, 6))
