"""A profile for people: one line per stage, with the error of its fit."""

from __future__ import annotations

from triptych.simulator.profile.profile import Profile

#: Times that a machine may have become slower or faster while it was measured.
_STEADY = 1.15
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def report(found: Profile) -> str:
    """The costs, how far the fits are from samples that they have not seen, and where this was."""
    machine = found.machine
    lines = [found.costs.source, ""]
    for stage, fit in found.fits.items():
        costs = ", ".join(f"{name} {seconds(cost)}" for name, cost in fit.costs.items())
        lines.append(f"{stage:8} {costs}")
        lines.append(
            f"{'':8} error {fit.median_error:.0%} median, {fit.p90_error:.0%} P90 of {fit.held_out} samples "
            f"not fitted; {fit.samples} in all"
        )
    pd, cores = found.costs.pd, found.costs.cores
    lines.append(f"{'rpc':8} {seconds(found.costs.rpc)} one way")
    lines.append(
        f"{'live':8} steps of a running worker take {found.settings.step_ratio:.2f} of those alone at that "
        f"time, a request waits {seconds(pd.take_busy)} on its way in"
    )
    lines.append(
        f"{'cores':8} a wake-up waits {seconds(cores.wake)} where all compute; a process at niceness 10 gets "
        f"{cores.nice_weight:.0%} of another's share, steps on a core of their own take {cores.own_core:.2f}"
    )
    lines.append("")
    lines.append(f"load average {machine.load_before:g} before, {machine.load_after:g} after")
    if machine.loaded:
        lines.append(
            f"MADE ON A LOADED MACHINE ({machine.load_before:g} on {machine.cores} cores): measure again"
        )
    drift = found.settings.step_drift
    if not 1 / _STEADY <= drift <= _STEADY:
        lines.append(
            f"THE MACHINE CHANGED ITS SPEED: steps alone took {drift:.2f} of what they had taken a minute "
            "before: measure again"
        )
    return "\n".join(lines)


def seconds(value: float) -> str:
    """In the unit that leaves one to three digits before the point."""
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if value >= scale), (1e-12, "ps"))
    return f"{value / scale:.3g} {unit}" if value else "0"
