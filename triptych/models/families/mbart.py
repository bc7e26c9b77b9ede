"""mBART: BART for many languages, normalised before every block and once more at the end.

The text's language is the tokenizer's own default; the output's is the checkpoint's forced first token, or
the second token of a decoder prompt.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from transformers import PreTrainedModel
from transformers.models.mbart.modeling_mbart import MBartDecoder, MBartEncoder

from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.families.bart import KEYS, BartTextDecoder, BartTextEncoder

__all__ = ["DECODER", "ENCODER", "KEYS"]


class MBartTextEncoder(BartTextEncoder):
    stack_class: ClassVar[type[PreTrainedModel]] = MBartEncoder

    def walk(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        stack: PreTrainedModel = self.module
        normed: torch.Tensor = stack.layer_norm(super().walk(token_ids, positions, mask))
        return normed

    def run_layer(self, layer: PreTrainedModel, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = layer(hidden, mask)
        return rows


class MBartTextDecoder(BartTextDecoder):
    stack_class: ClassVar[type[PreTrainedModel]] = MBartDecoder

    def walk(self, hidden: torch.Tensor, positions: torch.Tensor, attention: object) -> torch.Tensor:
        normed: torch.Tensor = self.module.decoder.layer_norm(super().walk(hidden, positions, attention))
        return normed


ENCODER: type[EncoderSide] = MBartTextEncoder
DECODER: type[DecoderSide] = MBartTextDecoder
