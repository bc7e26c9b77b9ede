"""A folder of finished cells: one JSON file each, whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from benchmarks.baselines.cell import Cell
from benchmarks.baselines.matrix import Matrix, as_fields
from triptych.errors import ConfigError
from triptych.goodput.report.result import write_json
from triptych.types import JsonObject

CELL = "triptych-baseline-cell/1"
PLAN = "triptych-baseline-plan/1"


class CellFiles:
    """The cells of one matrix in a folder that other matrices may share."""

    def __init__(self, folder: Path, matrix_name: str) -> None:
        self._folder = folder
        self._name = matrix_name
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, cell: Cell) -> Path:
        return self._folder / f"{self._name}.{cell.name}.json"

    def write(self, cell: Cell, found: JsonObject) -> None:
        _replace(self.path(cell), {"format": CELL, "matrix": self._name} | found)

    def write_plan(self, matrix: Matrix, cells: Sequence[Cell]) -> None:
        """What would be here if nothing were missing."""
        plan = {"format": PLAN, "matrix": as_fields(matrix), "cells": [cell.name for cell in cells]}
        _replace(self._folder / f"{self._name}.plan.json", plan)

    def read(self, cells: Iterable[Cell]) -> list[JsonObject]:
        """Those that are there, failed ones too, in the order of `cells`."""
        paths = [self.path(cell) for cell in cells]
        return [_read(path, CELL) for path in paths if path.exists()]


def read_folder(folder: Path) -> list[tuple[JsonObject, list[JsonObject]]]:
    """(plan, cells) of every matrix in the folder. ConfigError when there is none."""
    found = []
    for path in sorted(folder.glob("*.plan.json")):
        plan = _read(path, PLAN)
        name = plan["matrix"]["name"]
        paths = [folder / f"{name}.{cell}.json" for cell in plan["cells"]]
        found.append((plan, [_read(path, CELL) for path in paths if path.exists()]))
    if not found:
        raise ConfigError(
            f"{folder} holds no plan: run `python -m benchmarks baselines FILE --results {folder}`"
        )
    return found


def _replace(path: Path, found: JsonObject) -> None:
    """A reader, or a run that is cut off, never sees half a file."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    write_json(draft, found)
    draft.replace(path)


def _read(path: Path, form: str) -> JsonObject:
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}: remove it to measure the cell again") from error
    if not isinstance(found, dict) or found.get("format") != form:
        raise ConfigError(f"{path} is no {form}: remove it")
    return found
