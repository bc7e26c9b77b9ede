"""Whether to disaggregate at all, and why not where it loses."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.simulator.plan.estimate import Estimate
from triptych.simulator.plan.ratios import ALIKE, Ratios, Served


@dataclass(frozen=True, slots=True)
class Advice:
    """`disaggregate`: None where a search cannot tell. `gain`: the best ratio's rate over that of the better
    replicas, per dollar where they cost unequally; None where one of both serves nothing.
    """

    disaggregate: bool | None
    gain: float | None
    reason: str


def advise(ratios: Ratios, found: Estimate, price: float = 1.0) -> Advice:
    """From what was served, and the stages' bounds. `price`: what the best ratio costs, in replicas."""
    best, baseline = ratios.best, ratios.baseline
    if not best.shape.encoders:
        return Advice(
            False, None, "Don't disaggregate: no request has a picture, encoders would have nothing to do."
        )
    if not best.rate and not baseline.rate:
        return Advice(None, None, "Nothing serves this load within the SLO.")
    if not best.rate:
        return Advice(False, None, f"Don't disaggregate: only {baseline.name} serves this load.")
    if not baseline.rate:
        return Advice(True, None, f"Disaggregate: only {best.name} serves this load.")
    gain = best.rate / baseline.rate / price
    each = "" if price == 1 else " per dollar"
    limit, idle = _stages(best, found)
    serves = f"{best.name} serves {gain:.2f}x of {baseline.name}{each}"
    if ratios.better(best, baseline, price):
        return Advice(True, gain, f"Disaggregate: {serves}. {limit}.")
    if ratios.better(baseline, best, 1 / price):
        serves = f"{baseline.name} serves {1 / gain:.2f}x of {best.name}{each}"
        return Advice(False, gain, f"Don't disaggregate: {serves}. {limit}; {idle}.")
    words = f"{serves}, and a search cannot tell less than {ALIKE - 1:.0%}"
    return Advice(None, gain, f"Don't disaggregate for throughput: {words}. {limit}; {idle}.")


def _stages(best: Served, found: Estimate) -> tuple[str, str]:
    """Which pool limits the ratio, and how idle the other one is, as sentences have it."""
    shape = best.shape
    shares = {
        "encoders": best.rate / (shape.encoders * found.encoder),
        "PD workers": best.rate / (shape.pd_workers * found.pd_worker),
    }
    full, idle = sorted(shares, key=lambda name: shares[name], reverse=True)
    return (
        f"The {full} are its limit",
        f"its {idle} are at {min(shares[idle], 1.0):.0%} of what they could serve, "
        "while replicas use every device for both",
    )
