"""The tower of one rank: encodes its share of a batch in calls of the size that memory was measured for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.base.errors import InternalError
from triptych.encoder_worker.ranks.balance import calls
from triptych.models.base import EncoderSide, PreparedItem


class ShareEncoder:
    """A tower and the most patches of one call of it."""

    def __init__(self, encoder: EncoderSide, batch_patches: int) -> None:
        self._encoder = encoder
        self._batch_patches = batch_patches

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """One [rows, width] tensor per item, on the tower's device."""
        outputs: list[torch.Tensor] = []
        for call in calls([item.cost for item in items], self._batch_patches):
            outputs += self._encoder.encode([items[index] for index in call])
        for item, output in zip(items, outputs, strict=True):
            if tuple(output.shape) != (item.rows, self._encoder.width):
                raise InternalError(
                    f"the tower gave {tuple(output.shape)} for {item.rows}x{self._encoder.width} planned"
                )
        return outputs
