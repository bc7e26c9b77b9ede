"""What a soak leaves behind: memory of processes over time, its plot, and the table of the report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from support.chaos.soak import Faults, Tally


class Memory:
    """Resident memory of processes over time, in MiB; and their open files at the two ends."""

    def __init__(self, pids: dict[str, int], restarted: Callable[[], dict[str, int]]) -> None:
        self._pids = pids
        self._restarted = restarted
        self.samples: dict[str, list[tuple[float, float]]] = {name: [] for name in pids}
        #: Of processes that faults end: each sample is of whichever process has the name then.
        self.restarted: dict[str, list[tuple[float, float]]] = {}
        self.files: dict[str, list[int]] = {name: [] for name in pids}

    async def run(self) -> None:
        while True:
            self.poll()
            await asyncio.sleep(2)

    def poll(self) -> None:
        for name, pid in self._pids.items():
            with contextlib.suppress(OSError):
                self.samples[name].append((time.monotonic(), resident(pid)))
                self.files[name].append(len(os.listdir(f"/proc/{pid}/fd")))
        for name, pid in self._restarted().items():
            with contextlib.suppress(OSError):
                self.restarted.setdefault(name, []).append((time.monotonic(), resident(pid)))

    def settled(self, name: str) -> list[tuple[float, float]]:
        """Samples of the last three quarters: the first one warms up."""
        samples = self.samples[name]
        return samples[len(samples) // 4 :]

    def growth(self, name: str) -> float:
        """MiB that a straight line through the settled samples grows from their first to their last."""
        samples = self.settled(name)
        times = [at - samples[0][0] for at, _ in samples]
        sizes = [size for _, size in samples]
        mean_t, mean_s = sum(times) / len(times), sum(sizes) / len(sizes)
        spread = sum((t - mean_t) ** 2 for t in times)
        slope = sum((t - mean_t) * (s - mean_s) for t, s in zip(times, sizes, strict=True)) / (spread or 1.0)
        return slope * times[-1]


def resident(pid: int) -> float:
    """MiB of a process that are in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


def table(
    tally: Tally, faults: Faults, memory: Memory, counters: dict[str, float], seconds: float
) -> list[str]:
    """Lines of a Markdown report."""
    slow = sorted(tally.seconds)
    rows: list[tuple[str, Any]] = [
        ("seconds", f"{seconds:.0f}"),
        ("faults", sum(faults.done.values()) - faults.unmet),
        ("requests answered", tally.answered),
        ("lost", len(tally.lost)),
        ("wrong", len(tally.wrong)),
        ("first difference at a tie of the reference", tally.ties),
        ("429 and 503 with Retry-After, tried again", f"{tally.refused[429]} and {tally.refused[503]}"),
        ("streams that their clients left", tally.abandoned),
        *counters.items(),
        ("latency, median / P99 / worst, s", _latencies(slow)),
    ]
    lines = ["| figure | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    lines += ["", "| fault | times |", "| --- | --- |"]
    lines += [f"| {name} | {count} |" for name, count in sorted(faults.done.items())]
    lines += [
        "",
        "| process | RSS first | settled | last, MiB | growth after settling | files first, last |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, samples in memory.samples.items():
        sizes = [size for _, size in samples]
        files = memory.files[name]
        lines.append(
            f"| {name} | {sizes[0]:.1f} | {memory.settled(name)[0][1]:.1f} | {sizes[-1]:.1f} "
            f"| {memory.growth(name):+.1f} MiB | {files[0]}, {files[-1]} |"
        )
    return lines


def _latencies(ordered: Sequence[float]) -> str:
    return " / ".join(
        f"{ordered[min(int(len(ordered) * share), len(ordered) - 1)]:.2f}" for share in (0.5, 0.99, 1.0)
    )


def plot(memory: Memory, faults: Faults, path: Path) -> None:
    """Memory of every process over the minutes of the run; each fault is a grey line."""
    shown = memory.samples | {f"{name}, restarted by faults": on for name, on in memory.restarted.items()}
    figure, axes = plt.subplots(
        len(shown), 1, figsize=(9, 1.7 * len(shown)), sharex=True, layout="constrained"
    )
    start = min(samples[0][0] for samples in memory.samples.values())
    for axis, (name, samples) in zip(axes, shown.items(), strict=True):
        for at, _ in faults.log:
            axis.axvline((at - start) / 60, color="#dddddd", linewidth=0.6)
        axis.plot([(at - start) / 60 for at, _ in samples], [size for _, size in samples], color="#0072b2")
        axis.set_ylim(0, 1.15 * max(size for _, size in samples))
        axis.set_ylabel("RSS, MiB")
        axis.set_title(name, loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("minutes (grey lines: faults begin)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
