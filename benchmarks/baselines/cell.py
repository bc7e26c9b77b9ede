"""Cells, one kind of measurement of one system on one load once; and the folder of their files."""

from __future__ import annotations

import fnmatch
import os
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.baselines.matrix import KINDS, Matrix, as_fields
from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject
from triptych_bench.goodput.report.result import read_result, write_json


@dataclass(frozen=True, slots=True)
class Cell:
    """`repeat` counts from 0."""

    kind: str
    load: str
    system: str
    repeat: int

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.load}.{self.system}.{self.repeat}"


def plan_cells(matrix: Matrix) -> list[Cell]:
    """In the order of measuring: cut off anywhere, every system has had as many turns as its neighbours.

    The capacity that the fixed rates come from is measured first, in all its repeats; then repeat by repeat,
    within it kind by kind, load by load, system by system, every other repeat in reverse.
    """
    asked = {
        (cells.kind, load, system, repeat): None
        for cells in matrix.cells
        for load in cells.loads
        for system in cells.systems
        for repeat in range(matrix.repeats)
    }
    loads, systems = list(matrix.loads), [system.name for system in matrix.system]

    def place(cell: Cell) -> tuple[bool, int, int, int, int]:
        first = cell.kind == "capacity" and cell.system == matrix.capacity.of
        at = systems.index(cell.system)
        turn = -at if cell.repeat % 2 else at
        return (not first, cell.repeat, KINDS.index(cell.kind), loads.index(cell.load), turn)

    return sorted((Cell(*key) for key in asked), key=place)


T = TypeVar("T")


def chosen(named: Mapping[str, T], only: Collection[str]) -> list[T]:
    """Those whose name one of the patterns fits, such as `fixed.mix.*`; all without patterns."""
    for pattern in only:
        if not fnmatch.filter(named, pattern):
            raise ConfigError(f"--only {pattern!r} fits none: names are like {next(iter(named))}")
    return [
        item for name, item in named.items() if not only or any(fnmatch.fnmatchcase(name, p) for p in only)
    ]


def seed_of(cell: Cell, attempt: int) -> int:
    """All systems get the same requests; no other load, repeat, kind or attempt meets them in a cache."""
    words = f"{cell.kind} {cell.load} {cell.repeat} {attempt}"
    return zlib.crc32(words.encode()) % 1_000_000


CELL = "triptych-baseline-cell/1"
PLAN = "triptych-baseline-plan/1"
_ORIGIN = "`python -m benchmarks baselines`"


class CellFiles:
    """The cells of one matrix in a folder that other matrices may share."""

    def __init__(self, folder: Path, matrix_name: str) -> None:
        self._folder = folder
        self._name = matrix_name
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, cell: Cell) -> Path:
        return self._folder / f"{self._name}.{cell.name}.json"

    def write(self, cell: Cell, result: JsonObject) -> None:
        _replace(self.path(cell), {"format": CELL, "matrix": self._name} | result)

    def write_plan(self, matrix: Matrix, cells: Sequence[Cell]) -> None:
        """What would be here if nothing were missing."""
        plan = {"format": PLAN, "matrix": as_fields(matrix), "cells": [cell.name for cell in cells]}
        _replace(self._folder / f"{self._name}.plan.json", plan)

    def read(self, cells: Iterable[Cell]) -> list[JsonObject]:
        """Those that are there, failed ones too, in the order of `cells`."""
        paths = [self.path(cell) for cell in cells]
        return [read_result(path, CELL, _ORIGIN) for path in paths if path.exists()]


def read_folder(folder: Path) -> list[tuple[JsonObject, list[JsonObject]]]:
    """(plan, cells) of every matrix in the folder. ConfigError when there is none."""
    result = []
    for path in sorted(folder.glob("*.plan.json")):
        plan = read_result(path, PLAN, _ORIGIN)
        name = plan["matrix"]["name"]
        paths = [folder / f"{name}.{cell}.json" for cell in plan["cells"]]
        result.append((plan, [read_result(path, CELL, _ORIGIN) for path in paths if path.exists()]))
    if not result:
        raise ConfigError(
            f"{folder} holds no plan: run `python -m benchmarks baselines FILE --results {folder}`"
        )
    return result


def _replace(path: Path, result: JsonObject) -> None:
    """A reader, or a run that is cut off, never sees half a file."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    write_json(draft, result)
    draft.replace(path)
