"""Qwen3-VL: a tower that gives deepstack levels beside each embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.families.qwen import QwenEncoder
from triptych.models.families.qwen_graph import BufferShape
from triptych.models.generic.decoder import GenericDecoder
from triptych.models.weights.loading import KeyMap

KEYS = KeyMap(encoder=((r"^(model\.)?visual\.", "model.visual."),))


class Qwen3VLEncoder(QwenEncoder):
    """A row is the embedding and then one column block per deepstack level."""

    keys: ClassVar[KeyMap] = KEYS

    def graph_shapes(self, rows: int, frames: int) -> Mapping[str, BufferShape]:
        taps = (rows * self.merge_size**2, 4)
        return {"interp_indices": (taps, torch.int64), "interp_weights": (taps, torch.float32)}

    def graph_values(self, grids: torch.Tensor) -> dict[str, torch.Tensor]:
        tower = self.tower
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids,
            tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=self.merge_size,
        )
        return {"interp_indices": indices, "interp_weights": weights}


ENCODER: type[EncoderSide] = Qwen3VLEncoder
DECODER: type[DecoderSide] = GenericDecoder
