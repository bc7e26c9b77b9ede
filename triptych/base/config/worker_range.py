"""The sizes that a pool of workers may have: a fixed number, or a range between which it is scaled."""

from __future__ import annotations

import re
from dataclasses import dataclass

from triptych.base.errors import ConfigError

#: Workers of one pool on one machine, at most.
MOST_WORKERS = 64
_NUMBER = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True, slots=True)
class WorkerRange:
    """The least and the most workers of a pool, written like 4 (always four) or 0..4.

    A pool of a fixed number is not scaled. `WorkerRange(0, 0)`, written 0, leaves the number open.
    """

    least: int
    most: int

    @classmethod
    def fixed(cls, number: int) -> WorkerRange:
        """A pool that always has this many."""
        return cls(number, number)

    @property
    def scaled(self) -> bool:
        """Whether the number may change."""
        return self.least < self.most

    def clamp(self, workers: int) -> int:
        """The number in the range that is nearest to `workers`."""
        return max(self.least, min(workers, self.most))

    def __str__(self) -> str:
        return f"{self.least}..{self.most}" if self.scaled else str(self.most)


def parse_workers(text: str, flag: str, *, least: int, most: int, to_zero: bool) -> WorkerRange:
    """The range that `text` means for an option `flag`; ConfigError, with the remedy, where it means none.

    A fixed number is `least` to `most`; a range begins at 1, or where it may scale to zero at 0.
    """
    text = text[:40]
    first, dots, last = (part.strip() for part in text.partition(".."))
    begin = 0 if to_zero else 1
    if not _NUMBER.fullmatch(first) or (dots and not _NUMBER.fullmatch(last)):
        raise ConfigError(f"{flag} {text}: write a number of workers, like 2, or a range, like {begin}..4")
    fewest, highest = int(first), int(last if dots else first)
    if fewest > highest:
        raise ConfigError(
            f"{flag} {text}: the least is above the most; write {max(highest, begin)}..{fewest}"
        )
    if highest > most:
        raise ConfigError(f"{flag} {text}: at most {most} workers of a kind stand on one machine")
    if dots and highest == 0:
        raise ConfigError(f"{flag} {text}: the most is at least 1, like {begin}..1")
    if dots and fewest < begin:
        raise ConfigError(f"{flag} {text}: the least is at least {begin}; write {begin}..{highest}")
    if not dots and highest < least:
        zero = f"; {flag} 0..1 starts one when there is work" if to_zero else ""
        raise ConfigError(f"{flag} {text}: at least {least}{zero}")
    return WorkerRange(fewest, highest)
