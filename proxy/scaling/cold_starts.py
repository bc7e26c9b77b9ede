"""Cold starts of a pool: what workers have taken from the decision for them to their registration."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

#: Part that the newest start has in what is expected.
_NEWEST = 0.5
#: Starts that are waited for, at most; and seconds after which one is not waited for any more.
_MAXIMUM, _LONGEST = 1024, 3600.0


class ColdStarts:
    """The time from a decision for more workers to their registrations."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._asked: deque[float] = deque(maxlen=_MAXIMUM)
        #: Kind of each worker that is registered, by incarnation; None until the first poll.
        self._known: dict[str, str] | None = None

    def asked(self, workers: int, now: float) -> None:
        """This many more workers are desired from now on."""
        self._asked.extend(now for _ in range(min(workers, _MAXIMUM)))

    def withdrawn(self) -> None:
        """No more workers are desired than there are."""
        self._asked.clear()

    def poll(self, workers: Mapping[str, str], now: float) -> None:
        """The workers of the pool that are registered now, their kinds by incarnation."""
        known, self._known = self._known, dict(workers)
        if known is None:
            return
        while self._asked and now - self._asked[0] > _LONGEST:
            self._asked.popleft()
        for incarnation in workers.keys() - known.keys():
            if not self._asked:
                break
            seconds, kind = now - self._asked.popleft(), workers[incarnation]
            before = self.seconds.get(kind, seconds)
            self.seconds[kind] = before + _NEWEST * (seconds - before)

    def expected(self, kind: str) -> float:
        """Of this kind; of a kind that has never started here the longest of all; 0 while none has."""
        return self.seconds.get(kind, max(self.seconds.values(), default=0.0))
