"""Loads: one and four pictures, none, half or most of them seen before. Pure."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.against_peer.loads import Load
from triptych.goodput.load.workload import Workload
from triptych.goodput.measure.presets import preset

REUSES = (0, 50, 90)


def _workloads() -> dict[str, Workload]:
    """64 output tokens each; pictures of 320 x 320."""
    found = {}
    for name in ("image", "images-4"):
        for reuse in REUSES:
            found[f"{name}-{reuse}"] = replace(preset(name).workload, reuse=reuse / 100)
    return found


WORKLOADS = _workloads()
AT_ONCE = 8
LOADS = tuple(Load(name, AT_ONCE) for name in WORKLOADS)
#: Where replicas show each other's pictures.
SHARED = ("image-50", "images-4-50")
