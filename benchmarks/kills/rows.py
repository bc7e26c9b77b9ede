"""Rows of the page: what a system met at a fault, in one run or in several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.kills.load import Trial
from benchmarks.result_page import number

HEAD = ("fault", "system", "runs", "requests", "failed", "wrong", "stall of each run, s", "restarts by hand")
_NOT_COMPARED = "not compared"
_REASON = "- `"


@dataclass(frozen=True, slots=True)
class Row:
    """`wrong` is None where nothing says which tokens are right; `stalls` has the seconds of each run."""

    fault: str
    system: str
    requests: int
    failed: int
    wrong: int | None
    stalls: tuple[float, ...]
    by_hand: int

    @classmethod
    def of(cls, trial: Trial, right: Sequence[Sequence[int]] | None) -> Row:
        """`right` are the tokens of its requests."""
        wrong = None if right is None else sum(map(_differs, trial.answers, right))
        count = len(trial.answers)
        return cls(trial.fault, trial.system, count, trial.failed, wrong, (trial.stall,), trial.by_hand)

    @classmethod
    def read(cls, line: str) -> Row | None:
        """The row of a line of the page; None for any other line."""
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != len(HEAD) or not cells[2].isdigit():
            return None
        fault, system, _, requests, failed, wrong, stalls, by_hand = cells
        compared = None if wrong == _NOT_COMPARED else int(wrong)
        seconds = tuple(float(one) for one in stalls.split(", "))
        return cls(fault, system, int(requests), int(failed), compared, seconds, int(by_hand))

    def __add__(self, other: Row) -> Row:
        """Both, of one fault and system."""
        compared = self.wrong is not None and other.wrong is not None
        return Row(
            self.fault,
            self.system,
            self.requests + other.requests,
            self.failed + other.failed,
            (self.wrong or 0) + (other.wrong or 0) if compared else None,
            self.stalls + other.stalls,
            self.by_hand + other.by_hand,
        )

    @property
    def cells(self) -> tuple[str, ...]:
        wrong = _NOT_COMPARED if self.wrong is None else str(self.wrong)
        counts = (str(len(self.stalls)), str(self.requests), str(self.failed), wrong)
        return self.fault, self.system, *counts, ", ".join(map(number, self.stalls)), str(self.by_hand)


def added(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    """One row for each fault and system."""
    result: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row.fault, row.system)
        result[key] = result[key] + row if key in result else row
    return result


def rows_of(page: str) -> list[Row]:
    """Those that a page has."""
    return [row for line in page.splitlines() if (row := Row.read(line)) is not None]


def reasons_of(page: str) -> set[str]:
    """The errors that a page lists."""
    return {line[len(_REASON) : -1] for line in page.splitlines() if line.startswith(_REASON)}


def _differs(got: Sequence[int], want: Sequence[int]) -> bool:
    """Whether an answer has other tokens than the right one; a failed request has none."""
    return bool(got) and list(got) != list(want)
