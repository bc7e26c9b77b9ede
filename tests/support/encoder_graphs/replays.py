"""A family's graphs as an encoder worker has them, with plain calls over the static buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from support.encoder_graphs.adapters import Adapter
from triptych.base.machine.graphs import EagerStatic, GraphBackend
from triptych.encoder_worker.graphs.manager import BudgetGraphMetadata, EncoderCudaGraphManager
from triptych.encoder_worker.graphs.packing import GraphLimits
from triptych.models.base import PreparedItem

#: Rows of one item differ between a graph and an ordinary call by rounding only.
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Replays:
    """Captured graphs of one family, and items of it: budgets for one of them, for two, and for all."""

    encoder: Any
    manager: EncoderCudaGraphManager
    items: list[PreparedItem]

    @property
    def graphs(self) -> dict[int, BudgetGraphMetadata]:
        return self.manager._graphs

    def at(self, budget: int, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """A replay of this budget, whichever is the smallest that fits."""
        with torch.inference_mode():
            return self.manager._run_budget_graph(self.graphs[budget], items)

    def eager(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """What the ordinary call gives."""
        with torch.inference_mode():
            rows: list[torch.Tensor] = self.encoder.encode(items)
        return rows


def budgets_for(encoder: Any, rows: Sequence[int]) -> tuple[int, ...]:
    """The least budgets that hold these numbers of rows."""
    config = encoder.get_encoder_cudagraph_config()
    minimum, multiple = config.min_token_budget, config.token_multiple
    return tuple(sorted({max(minimum, -(-number // multiple) * multiple) for number in rows}))


def replays(
    adapter: Adapter,
    count: int = 4,
    *,
    tower: Any = None,
    poisoned: bool = False,
    backend: GraphBackend | None = None,
    **options: Any,
) -> Replays:
    """Captured graphs for up to `count` items.

    `tower` takes the encoder's place in capture and replay. `options` open the encoder: its device and dtype.
    """
    encoder: Any = adapter.open(**options)
    items = adapter.items(encoder, count)
    sizes = [item.rows for item in items]
    # A spare row shows that a call may end in the middle of a budget.
    budgets = budgets_for(encoder, [max(sizes), sum(sizes[:2]) + 1, sum(sizes) + 1])
    limits = GraphLimits(budgets, count, sum(map(encoder.encoder_cudagraph_item_frames, items)))
    manager = EncoderCudaGraphManager(tower or encoder, backend or EagerStatic(), limits, poisoned=poisoned)
    manager.capture()
    return Replays(encoder, manager, items)


class ChangedTower:
    """An encoder with other methods in the place of some."""

    def __init__(self, inner: Any, **methods: Any) -> None:
        self._inner, self._methods = inner, methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._inner, name)


def assert_rows(
    found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    """Equal within rounding, and free of NaN."""
    for rows, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(rows, expected, atol=tolerance, rtol=0)
