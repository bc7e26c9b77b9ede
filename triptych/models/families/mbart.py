"""mBART: BART for many languages, normalised before every block and once more at the end.

The text's language is the tokenizer's own default; the output's is the checkpoint's forced first token, or
the second token of a decoder prompt.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.mbart.modeling_mbart import MBartDecoder, MBartEncoder

from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.families.bart import KEYS, BartTextDecoder, BartTextEncoder

__all__ = ["DECODER", "ENCODER", "KEYS"]


class MBartTextEncoder(BartTextEncoder):
    @classmethod
    def stack(cls, config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
        stack: nn.Module = MBartEncoder._from_config(config, dtype=dtype, attn_implementation="sdpa")
        return stack

    def walk(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        stack: PreTrainedModel = self.module
        normed: torch.Tensor = stack.layer_norm(super().walk(token_ids, positions, mask))
        return normed

    def run_layer(self, layer: PreTrainedModel, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = layer(hidden, mask)
        return rows


class MBartTextDecoder(BartTextDecoder):
    @classmethod
    def stack(cls, config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
        stack: nn.Module = MBartDecoder._from_config(config, dtype=dtype, attn_implementation="sdpa")
        return stack

    def walk(self, hidden: torch.Tensor, positions: torch.Tensor, attention: object) -> torch.Tensor:
        normed: torch.Tensor = self.module.decoder.layer_norm(super().walk(hidden, positions, attention))
        return normed


ENCODER: type[EncoderSide] = MBartTextEncoder
DECODER: type[DecoderSide] = MBartTextDecoder
