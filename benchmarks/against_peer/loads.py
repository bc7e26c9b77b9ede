"""Loads: what is asked of every system, and how many requests at once. Pure."""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from triptych.errors import ConfigError
from triptych.goodput.load.workload import Workload
from triptych.goodput.measure.presets import preset

_TEXT = preset("text").workload
#: 64 output tokens each; pictures of 320 x 320.
WORKLOADS: dict[str, Workload] = {
    "text": _TEXT,
    "text-450": replace(_TEXT, text_tokens=450),
    **{name: preset(name).workload for name in ("image", "images-4", "reuse-50")},
}
CONCURRENCIES = (1, 4, 16)
#: Fewer say nothing of a mean.
_LEAST_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Load:
    """A workload in a closed loop of `at_once` requests, written `image@16`."""

    workload: str
    at_once: int

    @property
    def name(self) -> str:
        return f"{self.workload}@{self.at_once}"

    def requests(self, waves: int) -> int:
        """Measured requests of a round; as many as are in flight come before them, unmeasured."""
        return max(self.at_once * waves, _LEAST_REQUESTS)


LOADS = tuple(Load(workload, at_once) for workload in WORKLOADS for at_once in CONCURRENCIES)


def chosen(patterns: Sequence[str], loads: Sequence[Load]) -> list[Load]:
    """Those of `loads` that one of the patterns fits, such as `text*@16`; all without one."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(load.name, pattern) for load in loads):
            raise ConfigError(
                f"--only {pattern!r} fits no load: use {', '.join(load.name for load in loads)}"
            )
    return [
        load
        for load in loads
        if not patterns or any(fnmatch.fnmatchcase(load.name, pattern) for pattern in patterns)
    ]


def turn(systems: Sequence[str], number: int) -> list[str]:
    """The order of the systems in a round: each begins as often as it ends."""
    return list(systems) if number % 2 == 0 else list(reversed(systems))


def seed_of(model: str, load: Load, number: int) -> int:
    """Of a round's requests: the same for all systems, and for no other round, so that no cache answers."""
    return zlib.crc32(f"{model} {load.name} {number}".encode()) % 1_000_000
