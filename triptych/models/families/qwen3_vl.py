"""Qwen3-VL: deepstack levels beside each embedding, interleaved rotary positions in three dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from transformers import PreTrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.families.qwen import QwenDecoder, QwenEncoder
from triptych.models.families.qwen_graph import BufferShape
from triptych.models.generic.override import TEXT, TIED
from triptych.models.weights.loading import KeyMap

KEYS = KeyMap(
    encoder=((r"^(model\.)?visual\.", "model.visual."),),
    decoder=((r"^model\.language_model\.", TEXT), (r"^lm_head\.", "lm_head.")),
    tied=TIED,
)


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


class Qwen3VLDecoder(QwenDecoder):
    """Adds the deepstack levels of an image to the outputs of the first layers."""

    keys: ClassVar[KeyMap] = KEYS

    @classmethod
    def tp_plan(cls, config: PreTrainedConfig) -> Mapping[str, str]:
        # transformers has none for this text model, whose layers are those of Qwen3.
        return Qwen3Config.base_model_tp_plan or {}


ENCODER: type[EncoderSide] = Qwen3VLEncoder
DECODER: type[DecoderSide] = Qwen3VLDecoder
