"""Rows of a matrix: the first ones run with every change, the others in the slow suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def matrix(rows: Sequence[Any], *, quick: int = 1) -> list[Any]:
    """The rows for `pytest.mark.parametrize` or a fixture's `params`."""

    def slow(row: Any) -> Any:
        values = row if isinstance(row, tuple) else (row,)
        return pytest.param(*values, marks=pytest.mark.slow)

    return [*rows[:quick], *map(slow, rows[quick:])]
