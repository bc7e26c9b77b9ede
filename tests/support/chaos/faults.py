"""Faults in the engine threads of a cluster's workers: the thread is harmed, never its process."""

from __future__ import annotations

import os
from pathlib import Path

from support.processes.cluster import Cluster

#: As `engine_faults/sitecustomize.py` knows them.
FAULTS = ("dies", "hangs", "holds_the_interpreter", "loses_the_device")
#: What besides becomes of another rank of a worker, whose process is harmed.
RANK_FAULTS = (*FAULTS, "is_killed", "is_stopped")
#: Seconds after which an engine in these clusters counts as hung.
STALL = 8.0

#: The folder of sitecustomize.py, and that of the package `support`, from which it imports.
_PATCH = [str(Path(__file__).parents[1] / "engine_faults"), str(Path(__file__).parents[2])]


def environment(folder: Path) -> dict[str, str]:
    """What a cluster gets whose engines may be harmed by orders in `folder`, and count as hung soon."""
    return {**ordered(folder), "TRIPTYCH_STALL_TIMEOUT": str(STALL)}


def ordered(folder: Path) -> dict[str, str]:
    """The same with the stall timeout of a deployed one: engines may stop at gates, too."""
    folder.mkdir(parents=True, exist_ok=True)
    return {**patched(), "TRIPTYCH_TEST_FAULTS": str(folder)}


def gated(folder: Path) -> dict[str, str]:
    """What a cluster with this run folder gets whose engines stop at the gates of `support.chaos.stages`."""
    return {**patched(), "TRIPTYCH_TEST_GATES": str(folder)}


def sleeping(*, tower: float = 0.0, step: float = 0.0) -> dict[str, str]:
    """Environment of a cluster whose towers sleep `tower` seconds an item, and PD workers `step` a step."""
    return {**patched(), "TRIPTYCH_TEST_TOWER_SECONDS": str(tower), "TRIPTYCH_TEST_STEP_SECONDS": str(step)}


def patched() -> dict[str, str]:
    """What makes Python import `engine_faults/sitecustomize.py` in all processes of a cluster."""
    paths = [*_PATCH, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def order(folder: Path, service: str, pool: str, fault: str, after: int) -> None:
    """The engine of `pool` in the process `service` does so when it has computed `after` times more."""
    scratch = folder / f"{service}.{pool}.new"
    scratch.write_text(f"{fault} {after}")
    scratch.replace(folder / f"{service}.{pool}")


def struck(cluster: Cluster, service: str, pool: str, fault: str) -> bool:
    """Whether it has done so."""
    return f"{service}: its {pool} engine {fault}\n" in cluster.log.read_text(errors="replace")
