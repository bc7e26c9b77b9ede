"""Whether KV is loaded sooner than it is computed, by measured seconds per token of both."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

#: The weight of the newest measurement.
_NEW = 0.2
#: Where loading does not pay, one request of so many tries it nevertheless: things change.
_TRY_EVERY = 64
#: Fewest tokens that say something about speed.
_FEWEST_TOKENS = 64
#: Bounds of the seconds that a request waits for blocks, and the wait as a multiple of what computing takes.
_SHORTEST, _LONGEST, _PATIENCE = 0.25, 5.0, 1.5


class CostRule:
    """The rule of `--share-prefixes auto`; without `asked` all loads are taken to pay.

    Measurements come from several threads: a lost one does no harm.
    """

    def __init__(self, token_bytes: int, *, asked: bool) -> None:
        self._token_bytes = token_bytes
        self._asked = asked
        self._compute = self._move = 0.0
        self._said: bool | None = None
        self._left_out = 0

    def computed(self, tokens: int, seconds: float) -> None:
        """A step has prefilled so many tokens, and little else."""
        if tokens >= _FEWEST_TOKENS:
            self._compute = _mean(self._compute, seconds / tokens)

    def moved(self, tokens: int, seconds: float) -> None:
        """The KV of so many tokens went to or from the store, waits included."""
        if tokens >= _FEWEST_TOKENS:
            self._move = _mean(self._move, seconds / tokens)

    @property
    def pays(self) -> bool:
        """Loading takes less than computing, as far as is known."""
        if not self._asked or not self._compute or not self._move:
            return True
        pays = self._move < self._compute
        if pays != self._said:
            self._said = pays
            logger.info(
                "prefixes are %s: %d bytes a token move in %.0f us, a token is computed in %.0f us",
                "shared" if pays else f"shared by one request of {_TRY_EVERY} alone",
                self._token_bytes,
                1e6 * self._move,
                1e6 * self._compute,
            )
        return pays

    def tries(self) -> bool:
        """Whether the next request looks for its blocks."""
        if self.pays:
            return True
        self._left_out += 1
        return self._left_out % _TRY_EVERY == 0

    def patience(self, tokens: int) -> float:
        """Seconds that a request waits for the blocks of so many tokens."""
        needed = self._compute * tokens * _PATIENCE if self._compute else _LONGEST
        return min(max(needed, _SHORTEST), _LONGEST)


def _mean(known: float, new: float) -> float:
    return new if not known else known + _NEW * (new - known)
