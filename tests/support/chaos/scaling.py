"""The changes of a cluster's scaled pools, as its supervisor logs them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from support.processes.cluster import Cluster

_CHANGE = re.compile(r"(encoder|pd) pool of (\d+) \((\w+)\): (.*)")
_WORKER = re.compile(r"(start|drain) ((?:encoder|pd)-\d+)")


@dataclass(frozen=True)
class Change:
    """One change: how many ran before, why it changed, and by how many it grew or (below 0) shrank."""

    before: int
    reason: str
    by: int

    @property
    def after(self) -> int:
        return self.before + self.by


def changes(cluster: Cluster, pool: str, since: int = 0) -> list[Change]:
    """The pool's changes, in their order; of the log only what comes after `since` characters."""
    found = []
    for name, before, reason, rest in _CHANGE.findall(cluster.log.read_text(errors="replace")[since:]):
        words = [word for word, _ in _WORKER.findall(rest)]
        assert len(set(words)) == 1, f"both directions at once: {rest}"
        by = len(words) if words[0] == "start" else -len(words)
        found += [Change(int(before), reason, by)] if name == pool else []
    return found


def directions(found: Sequence[Change]) -> list[str]:
    """ "up" and "down" in turns: one word for each time that the direction changed, and for the first."""
    return [word for word, _ in groupby("up" if change.by > 0 else "down" for change in found)]
