"""The time line as a picture: workers, backlog and requests above each other."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.scaling.timeline import Timeline
from triptych.goodput.report.plots import COLOURS


def save_timeline(timeline: Timeline, title: str, path: Path) -> None:
    """Draws the samples into a PNG."""
    figure, axes = plt.subplots(3, 1, figsize=(9.0, 7.0), sharex=True, layout="constrained")
    figure.suptitle(title)
    at = [sample.at for sample in timeline.samples]
    workers, backlog, requests = axes
    for name, colour, style in (("running", 0, "-"), ("ready", 2, "-"), ("desired", 1, "--")):
        values = [getattr(sample, name) for sample in timeline.samples]
        workers.step(at, values, where="post", label=name, color=COLOURS[colour], linestyle=style)
    workers.set_ylabel("encoders")
    workers.yaxis.get_major_locator().set_params(integer=True)
    workers.legend(loc="upper right", frameon=False, ncols=3)
    _area(backlog, at, [sample.backlog for sample in timeline.samples], "backlog, work-seconds", 3)
    _area(requests, at, [sample.in_flight for sample in timeline.samples], "requests in flight", 4)
    requests.set_xlabel("seconds")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        # Room for the legend above the lines.
        axis.set_ylim(0, 1.25 * max(axis.get_ylim()[1], 1.0))
        for burst in timeline.bursts:
            axis.axvline(burst, color=COLOURS[6], linewidth=1, linestyle=":")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _area(axis: Axes, at: list[float], values: list[float], label: str, colour: int) -> None:
    axis.fill_between(at, values, step="post", color=COLOURS[colour], alpha=0.5)
    axis.set_ylabel(label)
