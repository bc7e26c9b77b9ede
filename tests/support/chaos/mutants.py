"""Mutants in the workers of a running cluster, which no comparison with generate may overlook."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from support.chaos.faults import patched
from support.engine_faults.mutants import VARIABLE
from support.processes.families import FAMILIES, PICTURES

#: The families whose answers each of them changes, as `engine_faults/mutants.py` knows them. What an
#: encoder-decoder model attends to is one item without positions: neither the order of items nor that of rows
#: is anything to it.
MUTANTS = {
    "swapped_items": PICTURES,
    "zeroed_deepstack": ("qwen3_vl",),
    "positions_in_one_dimension": ("qwen3_vl", "qwen2_5_vl"),
    "rows_shifted_by_one": PICTURES,
    "rows_of_the_item_before": FAMILIES,
}


def environment(folder: Path) -> dict[str, str]:
    """What a cluster gets in whose workers mutants may be put, by a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return {**patched(), VARIABLE: str(folder / "mutant")}


@contextlib.contextmanager
def mutant(folder: Path, name: str, path: Path) -> Iterator[None]:
    """Requests that begin now meet this mutant; `path` is the checkpoint that is served."""
    config = json.loads((path / "config.json").read_text())
    width = config.get("text_config", config).get("hidden_size", 0)
    scratch, file = folder / "mutant.new", folder / "mutant"
    scratch.write_text(f"{name} {width}")
    scratch.replace(file)
    try:
        yield
    finally:
        file.unlink()
