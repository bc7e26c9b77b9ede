"""Edges of the product: optional modules that the core names, and works without."""

from __future__ import annotations

import importlib
from types import ModuleType


def load_edge(name: str) -> ModuleType | None:
    """The module; None where it, or a package that it is in, is not installed.

    What an installed edge misses itself is its error and is raised.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None
