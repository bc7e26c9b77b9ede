"""Qwen2.5-VL: a tower with window attention (it undoes its own reordering), sectioned rotary positions."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLTextModel,
)

from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.families.qwen import QwenDecoder, QwenEncoder
from triptych.models.weights.loading import KeyMap

#: The hub writes `visual.` and `model.layers.`; transformers writes `model.visual.` and
#: `model.language_model.layers.` when asked for its own names.
KEYS = KeyMap(
    encoder=((r"^(model\.)?visual\.", ""),),
    decoder=(
        (r"^model\.language_model\.", "model."),
        (r"^model\.(?!visual\.)", "model."),
        (r"^lm_head\.", "lm_head."),
    ),
)


class Qwen2_5VLEncoder(QwenEncoder):
    keys: ClassVar[KeyMap] = KEYS

    @classmethod
    def tower(cls, config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
        tower: nn.Module = Qwen2_5_VisionTransformerPretrainedModel._from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
        return tower


class Qwen2_5VLDecoder(QwenDecoder):
    keys: ClassVar[KeyMap] = KEYS

    @classmethod
    def text_model(cls, config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
        model: nn.Module = Qwen2_5_VLTextModel._from_config(config, dtype=dtype, attn_implementation="sdpa")
        return model


ENCODER: type[EncoderSide] = Qwen2_5VLEncoder
DECODER: type[DecoderSide] = Qwen2_5VLDecoder
