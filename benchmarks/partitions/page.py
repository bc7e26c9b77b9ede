"""The page of measured cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

KINDS = ("text", "repeated", "fresh")


@dataclass(frozen=True, slots=True)
class Measured:
    """What was asked during one cut: seconds of every answer by kind, and what went wrong."""

    name: str
    seconds: dict[str, list[float]]
    #: Replies with another status than 200, by status.
    refused: dict[int, int] = field(default_factory=dict)
    #: Answers whose tokens are not those of the calm cluster.
    wrong: int = 0


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _row(measured: Measured) -> str:
    cells = [f"{quantile(measured.seconds.get(kind, []), 0.99):.2f}" for kind in KINDS]
    asked = sum(map(len, measured.seconds.values())) + sum(measured.refused.values())
    refused = ", ".join(f"{count} x {status}" for status, count in sorted(measured.refused.items()))
    return f"| {measured.name} | {asked} | {' | '.join(cells)} | {refused or '0'} | {measured.wrong} |"


def table(rows: Sequence[Measured]) -> list[str]:
    return [
        "| cut | asked | text P99 s | repeated P99 s | fresh P99 s | not answered | wrong |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *map(_row, rows),
    ]
