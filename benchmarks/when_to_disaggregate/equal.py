"""Equal devices: the best ratio of four A100 against four replicas of either kind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.goodput.load.workload import Workload
from triptych.goodput.measure.presets import preset
from triptych.goodput.measure.slo import Slo
from triptych.progress.progress import each
from triptych.simulator.plan.answer import CapacityPlan, Wanted, answer
from triptych.simulator.plan.question import Question, read_device

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
        plan = answer(asked, Wanted(sensitivity=False))
        rates = ", ".join(f"{one.name} {one.rate:.2f}" for one in plan.ratios.all)
        print(f"{case.name}, TPOT {case.tpot:g}: {rates}", file=sys.stderr, flush=True)
        yield case, plan


def table(found: list[tuple[Case, CapacityPlan]]) -> list[str]:
    lines = [
        "| load | P99 TTFT, TPOT | best ratio | replicas in turn | replicas in-step | apart / better "
        "| advice |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, plan in found:
        best, ratios = plan.ratios.best, plan.ratios
        vllm = ratios.in_step.rate if ratios.in_step is not None else 0.0
        gain = plan.advice.gain
        lines.append(
            f"| {case.name} | {case.ttft:g}, {case.tpot:g} ms | {best.name}: {best.rate:.2f} "
            f"| {ratios.replicas.rate:.2f} | {vllm:.2f} | {f'{gain:.2f}' if gain is not None else '–'} "
            f"| {plan.advice.reason} |"
        )
    return lines
