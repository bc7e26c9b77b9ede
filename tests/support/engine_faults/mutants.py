"""In a worker's process: embeddings and positions as a wrong engine would have them, while a test says so.

The file that TRIPTYCH_TEST_MUTANT names holds the mutant that is in force, and the decoder's width; no file:
none is. `tests/e2e/test_features_together.py` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from support.engine_faults.import_patches import Patches

VARIABLE = "TRIPTYCH_TEST_MUTANT"


def _in_force() -> tuple[str, int]:
    """The mutant's name, "" for none, and the decoder's width."""
    try:
        name, width = Path(os.environ[VARIABLE]).read_text().split()
    except FileNotFoundError:
        return "", 0
    return name, int(width)


def _patch_encoder(module: ModuleType) -> None:
    """Embeddings are spoilt after the tower, before they are copied, served and saved."""
    init = module.EncoderEngine.__init__
    #: The embedding of the item before.
    last: list[Any] = []

    def spoils(outputs: Sequence[Any]) -> list[Any]:
        name, width = _in_force()
        spoilt = []
        for rows in outputs:
            spoilt.append(_spoilt(rows, name, width, last[-1] if last else rows))
            last[:] = [rows.clone()]
        return spoilt

    def initialises(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        to_host = self._to_host
        self._to_host = lambda outputs, **options: to_host(spoils(outputs), **options)

    module.EncoderEngine.__init__ = initialises


def _spoilt(rows: Any, name: str, width: int, last: Any) -> Any:
    """Another embedding [rows, width] in place of `rows`; `rows` itself for mutants of something else."""
    if name == "zeroed_deepstack":
        spoilt = rows.clone()
        spoilt[:, width:] = 0
        return spoilt
    if name == "rows_shifted_by_one":
        return rows.roll(1, 0).contiguous()
    if name == "rows_of_the_item_before":
        times = -(-len(rows) // len(last))
        return last.repeat(times, 1)[: len(rows)].contiguous()
    return rows


def _patch_input_processor(module: ModuleType) -> None:
    """Items and positions are spoilt before the request reaches the scheduler and the other rank."""
    process = module.InputProcessor.process

    def processes(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        name, _ = _in_force()
        if name == "swapped_items":
            request.features = _swapped(request.features)
        if name == "positions_in_one_dimension":
            import torch

            rows, tokens = request.positions.shape
            request.positions = torch.arange(tokens).expand(rows, -1).contiguous()
            request.position_delta = 0
        return request

    module.InputProcessor.process = processes


def _swapped(features: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first two items change places, where they are two of the same size."""
    if len(features) < 2:
        return features
    first, second, *others = features
    assert (first.plan.rows, first.plan.length) == (second.plan.rows, second.plan.length)
    return (replace(first, plan=second.plan), replace(second, plan=first.plan), *others)


PATCHES: Patches = {
    "triptych.encoder_worker.engine": _patch_encoder,
    "triptych.pd_worker.frontend.input_processor": _patch_input_processor,
}
