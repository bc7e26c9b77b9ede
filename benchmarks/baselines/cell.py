"""Cells: one kind of measurement of one system on one load, once. Pure."""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.baselines.matrix import KINDS, Matrix
from triptych.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cell:
    """`repeat` counts from 0."""

    kind: str
    load: str
    system: str
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.load}.{self.system}.{self.repeat}"


def plan_cells(matrix: Matrix, repeats: int = 0) -> list[Cell]:
    """In the order of measuring: cut off anywhere, every system has had as many turns as its neighbours.

    The capacity that the fixed rates come from is measured first, in all its repeats; then repeat by repeat,
    within it kind by kind, load by load, system by system, every other repeat in reverse.
    """
    asked = {
        (cells.kind, load, system, repeat): None
        for cells in matrix.cells
        for load in cells.loads
        for system in cells.systems
        for repeat in range(repeats or cells.repeats or matrix.repeats)
    }
    loads, systems = list(matrix.loads), [system.name for system in matrix.system]

    def place(cell: Cell) -> tuple[bool, int, int, int, int]:
        first = cell.kind == "capacity" and cell.system == matrix.capacity.of
        at = systems.index(cell.system)
        turn = -at if cell.repeat % 2 else at
        return (not first, cell.repeat, KINDS.index(cell.kind), loads.index(cell.load), turn)

    return sorted((Cell(*key) for key in asked), key=place)


def chosen(cells: Sequence[Cell], only: Iterable[str]) -> list[Cell]:
    """Those whose name one of the patterns fits, such as `fixed.mix.*`; all without patterns."""
    patterns = list(only)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(cell.name, pattern) for cell in cells):
            raise ConfigError(
                f"--only {pattern!r} fits no cell: names are kind.load.system.repeat, like {cells[0].name}"
            )
    return [
        cell
        for cell in cells
        if not patterns or any(fnmatch.fnmatchcase(cell.name, pattern) for pattern in patterns)
    ]


def seed_of(cell: Cell, attempt: int) -> int:
    """All systems get the same requests; no other load, repeat, kind or attempt meets them in a cache."""
    words = f"{cell.kind} {cell.load} {cell.repeat} {attempt}"
    return zlib.crc32(words.encode()) % 1_000_000
