"""B: a client that asks for something small again and again, and what it meets."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from benchmarks.fairness.flood import Question, question
from benchmarks.fairness.sends import Client, Door

#: Between two of B's requests.
PAUSE_SECONDS = 0.05


@dataclass
class Figures:
    """What B met: the seconds of each answer, infinite where none came in `patience`, and its refusals."""

    patience: float
    seconds: list[float] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    @property
    def asked(self) -> int:
        return len(self.seconds) + len(self.refused)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan

    @property
    def p50(self) -> float:
        return self.percentile(0.5)

    @property
    def p99(self) -> float:
        return self.percentile(0.99)


async def ask_for(
    door: Door,
    key: str,
    asks: Question,
    seconds: float,
    patience: float,
    least: int = 1,
    enough: float = math.inf,
) -> Figures:
    """Asks until it has asked `enough` times, or for so many seconds, and at least so often; an answer is
    waited for `patience` seconds."""
    figures = Figures(patience)
    number, begun = 0, time.monotonic()
    async with Client(door, key) as client:
        while figures.asked < least or (figures.asked < enough and time.monotonic() - begun < seconds):
            number += 1
            post = question(asks, f"{begun} {number}")
            asked = time.monotonic()
            try:
                async with asyncio.timeout(patience):
                    status, _ = await client.post(post)
            except TimeoutError:
                figures.seconds.append(math.inf)
                continue
            except OSError:
                status = 0
            if status == 200:
                figures.seconds.append(time.monotonic() - asked)
            else:
                figures.refused.append(status)
            await asyncio.sleep(PAUSE_SECONDS)
    return figures
