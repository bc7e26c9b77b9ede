"""Output tokens that are generated a second time, because vLLM can only begin at the prompt."""

from __future__ import annotations

from collections.abc import Sequence


class Diverged(Exception):
    """A token that came again is another one than before."""


class Replay:
    """The tokens that are known already, and are to come first."""

    def __init__(self, known: Sequence[int]) -> None:
        self._known = tuple(known)
        self._seen = 0

    def is_new(self, token_id: int) -> bool:
        """Whether the next token of the stream is a new one. Diverged where it is not the one expected."""
        if self._seen >= len(self._known):
            return True
        if token_id != self._known[self._seen]:
            raise Diverged(f"output token {self._seen} is {token_id}, and was {self._known[self._seen]}")
        self._seen += 1
        return False
