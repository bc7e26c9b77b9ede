"""How often, and after which pause, a failed call of vLLM is repeated for one request. Pure."""

from __future__ import annotations

#: Failures in a row, without a token or a missing item between them, that end a request.
MAX_FAILURES = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class Retries:
    """The failures of one request in a row. A busy server is waited for until the request's deadline."""

    def __init__(self) -> None:
        self.failures = 0
        self._busy = 0
        #: A replay has diverged: the request goes on from the tokens that it has.
        self.no_replay = False

    def pause(self, *, busy: bool) -> float | None:
        """Seconds to wait after one more failure; None where the request is given up."""
        if busy:
            self._busy += 1
            return _pause(self._busy)
        self.failures += 1
        return None if self.failures >= MAX_FAILURES else _pause(self.failures)

    def reset(self) -> None:
        """The request has come further, or the reason of its failure is known."""
        self.failures = self._busy = 0


def _pause(count: int) -> float:
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (count - 1))
