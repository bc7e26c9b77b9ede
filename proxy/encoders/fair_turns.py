"""FairTurns: the order of work for which tenants queue, one of each in turn."""

from __future__ import annotations


class FairTurns:
    """Turns by tenant: whoever comes is next but for the others' next ones, however much they have queued.

    Work of one tenant, or of none, keeps its order.
    """

    def __init__(self) -> None:
        #: The last turn that each tenant has drawn, where it is not over.
        self._drawn: dict[str, int] = {}
        self._now = 0

    def draw(self, tenant: str) -> int:
        turn = max(self._drawn.get(tenant, 0), self._now) + 1
        self._drawn[tenant] = turn
        return turn

    def begin(self, turn: int) -> None:
        """Work of this turn begins."""
        if turn > self._now:
            self._now = turn
            if len(self._drawn) > 64:
                self._drawn = {tenant: drawn for tenant, drawn in self._drawn.items() if drawn > turn}
