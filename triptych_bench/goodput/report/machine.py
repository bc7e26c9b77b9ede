"""What a result says of where it was made: commit, versions, chip, load."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from triptych.base.machine.resources import cpu_name

#: A load average above this share of the cores, before the first request, marks a run as made on a loaded
#: machine.
LOADED_SHARE = 0.25
_HERE = Path(__file__).resolve().parent
_PACKAGES = ("aiohttp", "numpy", "torch", "transformers", "uvloop")


@dataclass(frozen=True, slots=True)
class Machine:
    """`load_before` and `load_after` are one-minute load averages; `commit` ends in -dirty when it is."""

    commit: str
    versions: dict[str, str]
    chip: str
    cores: int
    memory_gib: float
    system: str
    command: str
    load_before: float
    load_after: float

    @property
    def loaded(self) -> bool:
        """Whether other processes used the cores before: the run's figures are then no claim."""
        return self.load_before > LOADED_SHARE * self.cores


def load_average() -> float:
    """Of the last minute."""
    return round(os.getloadavg()[0], 2)


def describe(load_before: float) -> Machine:
    """This machine, now at the end of a run."""
    return Machine(
        commit=commit(),
        versions=_versions(),
        chip=cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        system=f"{platform.system()} {platform.release()}",
        command=" ".join(["triptych", *sys.argv[1:]]),
        load_before=load_before,
        load_after=load_average(),
    )


def _versions() -> dict[str, str]:
    from triptych import __version__

    result = {"triptych": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def commit(folder: Path = _HERE) -> str:
    """The commit of the source tree, by default of this one; empty outside of a checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
