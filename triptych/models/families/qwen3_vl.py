"""Qwen3-VL: deepstack levels beside each embedding, interleaved rotary positions in three dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel, Qwen3VLVisionModel
from transformers.utils import ModelOutput
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from triptych.models.base import DecoderSide, EncoderSide, MergedEmbeds
from triptych.models.families.qwen import QwenDecoder, QwenEncoder
from triptych.models.families.qwen_graph import BufferShape
from triptych.models.weights.loading import KeyMap

KEYS = KeyMap(
    encoder=((r"^(model\.)?visual\.", ""),),
    decoder=((r"^model\.language_model\.", "model."), (r"^lm_head\.", "lm_head.")),
)


class Qwen3VLEncoder(QwenEncoder):
    """A row is the embedding and then one column block per deepstack level."""

    keys: ClassVar[KeyMap] = KEYS

    @classmethod
    def tower(cls, config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
        tower: nn.Module = Qwen3VLVisionModel._from_config(config, dtype=dtype, attn_implementation="sdpa")
        return tower

    @classmethod
    def row_width(cls, config: PreTrainedConfig) -> int:
        return int(config.out_hidden_size) * (1 + len(config.deepstack_visual_indexes))

    def columns(self, out: ModelOutput) -> list[torch.Tensor]:
        return [out.pooler_output, *out.deepstack_features]

    def graph_shapes(self, rows: int, frames: int) -> Mapping[str, BufferShape]:
        taps = (rows * self.merge_size**2, 4)
        return {"interp_indices": (taps, torch.int64), "interp_weights": (taps, torch.float32)}

    def graph_values(self, grids: torch.Tensor) -> dict[str, torch.Tensor]:
        tower: Any = self.module
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
    def text_model(cls, config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
        model: nn.Module = Qwen3VLTextModel._from_config(config, dtype=dtype, attn_implementation="sdpa")
        return model

    @classmethod
    def tp_plan(cls, config: PreTrainedConfig) -> Mapping[str, str]:
        # transformers has none for this text model, whose layers are those of Qwen3.
        return Qwen3Config.base_model_tp_plan or {}

    @classmethod
    def deepstack_levels(cls, config: PreTrainedConfig) -> int:
        return len(config.vision_config.deepstack_visual_indexes)

    def deepstack(self, merged: MergedEmbeds, tokens: int) -> dict[str, object]:
        mask = torch.zeros(1, tokens, dtype=torch.bool, device=merged.index.device)
        mask[0, merged.index] = True
        levels = torch.split(merged.rows, self.geometry.hidden_size, dim=1)[1:]
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": list(levels)}


ENCODER: type[EncoderSide] = Qwen3VLEncoder
DECODER: type[DecoderSide] = Qwen3VLDecoder
