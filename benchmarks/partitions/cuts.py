"""The cuts that are measured: every pair of hosts that talk, both ways and one way, and each host alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

#: Of each kind one is cut off; the second of its kind is well.
PAIRS = (
    ("store", "encoder-0"),
    ("store", "pd-0"),
    ("store", "proxy-0"),
    ("proxy-0", "encoder-0"),
    ("proxy-0", "pd-0"),
    ("proxy-0", "proxy-1"),
    ("encoder-0", "pd-0"),
)
ALONE = ("encoder-0", "pd-0", "proxy-0", "store")


class Hosts(Protocol):
    """The network's part that a cut uses."""

    def cut(self, sender: str, receiver: str, *, both: bool = True) -> None: ...

    def isolate(self, host: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut. `silent`: proxies that clients do not ask meanwhile, as a load balancer would not."""

    name: str
    make: Callable[[Hosts], None]
    silent: tuple[str, ...] = ()


def _pair(first: str, second: str) -> list[Cut]:
    return [
        Cut(f"{first} – {second}, both ways", lambda hosts: hosts.cut(first, second)),
        Cut(f"{first} → {second} only", lambda hosts: hosts.cut(first, second, both=False)),
        Cut(f"{second} → {first} only", lambda hosts: hosts.cut(second, first, both=False)),
    ]


def _alone(host: str) -> Cut:
    silent = (host,) if host.startswith("proxy") else ()
    return Cut(f"{host} isolated", lambda hosts: hosts.isolate(host), silent)


def all_cuts() -> list[Cut]:
    return [*(cut for pair in PAIRS for cut in _pair(*pair)), *map(_alone, ALONE)]
