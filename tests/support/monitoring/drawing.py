"""Pictures of dashboards, for people to look at: each panel with the series of its queries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from support.monitoring.grafana import Dashboard
from support.monitoring.prometheus import Line

_COLUMNS = 4


def draw(dashboard: Dashboard, lines: Mapping[str, Mapping[str, list[Line]]], path: Path) -> None:
    """Draws the panels in a grid; `lines` are the series by panel and legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = dashboard.panels
    rows = math.ceil(len(panels) / _COLUMNS)
    figure, axes = pyplot.subplots(rows, _COLUMNS, figsize=(5 * _COLUMNS, 3 * rows), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set_title(f"{panel.title} [{panel.unit}]", fontsize=9)
        for legend, found in lines[panel.title].items():
            for line in found:
                text = legend
                for name, value in line.labels.items():
                    text = text.replace(f"{{{{{name}}}}}", value)
                start = line.points[0][0]
                axis.plot(
                    [at - start for at, _ in line.points], [value for _, value in line.points], label=text
                )
        axis.set_ylim(bottom=0)
        if axis.lines:
            axis.legend(fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=60)
    pyplot.close(figure)
