"""The result of `triptych profile`: the costs of each stage on this machine, as a file and as a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from triptych.goodput.report.machine import Machine
from triptych.simulator.costs.costs import CostModel, ModelShape
from triptych.simulator.profile.fit import Fit, Sample

FORMAT = "triptych-profile/1"
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What to measure: `model` is a checkpoint folder; `threads` 0 means the workers' default."""

    model: Path
    name: str
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 0
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the measurement."""

    model: str
    device: str
    dtype: str
    encoder_threads: int
    pd_threads: int
    quick: bool
    max_num_batched_tokens: int
    encoder_batch_patches: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs and sizes, with the fits and samples that they come from."""

    costs: CostModel
    shape: ModelShape
    settings: Settings
    machine: Machine
    fits: dict[str, Fit]
    samples: dict[str, list[Sample]]


def write_profile(path: Path, found: Profile) -> None:
    """Writes JSON with the costs on top, as `read_costs` reads them."""
    parts = asdict(found)
    costs = parts.pop("costs")
    parts["machine"]["loaded"] = found.machine.loaded
    document = {"format": FORMAT} | costs | parts
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def report(found: Profile) -> str:
    """The costs, the errors of the fits on held-out samples, and the state of the machine."""
    machine = found.machine
    lines = [found.costs.source, ""]
    for stage, fit in found.fits.items():
        costs = ", ".join(f"{name} {seconds(cost)}" for name, cost in fit.costs.items())
        lines.append(f"{stage:8} {costs}")
        lines.append(
            f"{'':8} error {fit.median_error:.0%} median, {fit.p90_error:.0%} P90 of {fit.held_out} samples "
            f"not fitted; {fit.samples} in all"
        )
    lines.append(f"{'rpc':8} {seconds(found.costs.rpc)} one way")
    lines.append("")
    lines.append(f"load average {machine.load_before:g} before, {machine.load_after:g} after")
    if machine.loaded:
        lines.append(
            f"MADE ON A LOADED MACHINE ({machine.load_before:g} on {machine.cores} cores): measure again"
        )
    return "\n".join(lines)


def seconds(value: float) -> str:
    """In the unit that leaves one to three digits before the point."""
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if value >= scale), (1e-12, "ps"))
    return f"{value / scale:.3g} {unit}" if value else "0"
