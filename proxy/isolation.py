"""Who may be worked on beside whom, in one look at all jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Isolation:
    """A suspect, which may have killed its encoders, is alone at its encoder: so nobody else is blamed.

    `at_work` has the address, and whether it is a suspect, of every job in preprocessing or in a tower.
    """

    def __init__(self, at_work: Iterable[tuple[str, bool]]) -> None:
        self._busy: Counter[str] = Counter()
        self._closed: set[str] = set()
        for address, suspect in at_work:
            self.enter(address, suspect=suspect)

    def admits(self, address: str, *, suspect: bool) -> bool:
        """Whether the job may begin there now."""
        return address not in self._closed and not (suspect and self._busy[address])

    def enter(self, address: str, *, suspect: bool) -> None:
        """The job has begun there."""
        self._busy[address] += 1
        if suspect:
            self._closed.add(address)

    def keep(self, addresses: Iterable[str]) -> None:
        """A suspect waits for the emptiest of these to become empty: nothing begins there before it."""
        free = [address for address in addresses if address not in self._closed]
        if free:
            self._closed.add(min(free, key=lambda address: (self._busy[address], address)))
