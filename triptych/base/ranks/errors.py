"""Errors of a worker's ranks."""

from __future__ import annotations

from triptych.base.errors import TriptychError


class RankLost(BaseException):
    """A rank is dead, or does not answer in time: its worker cannot go on.

    A BaseException, since Exceptions are caught in many places: it ends the engine's thread, and the
    watchdog then ends the process.
    """


class RankFailed(TriptychError):
    """A rank's program raised an Exception; the rank lives and waits for the next command."""

    def __init__(self, rank: int, kind: str, text: str) -> None:
        """`kind` is the name of the exception's class, `text` what it says."""
        super().__init__(f"rank {rank}: {kind}: {text}")
        self.rank = rank
        self.kind = kind
        self.text = text


class RankStartError(TriptychError):
    """The ranks of a worker did not start, for another reason than the configuration."""
