"""BART: text to text, learned positions, normalised after every block. The pattern of its kind."""

from __future__ import annotations

from typing import ClassVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.bart.modeling_bart import BartDecoder, BartEncoder

from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.families.encdec import EncDecDecoder
from triptych.models.families.text_encoder import TextEncoder
from triptych.models.weights.loading import KeyMap

#: One table of token embeddings serves encoder, decoder and head; files hold it under one name or several,
#: with `model.` in front or, where they were saved without a head, not.
KEYS = KeyMap(
    encoder=(
        (r"^(model\.)?shared\.", "embed_tokens."),
        (r"^(model\.)?encoder\.", ""),
    ),
    decoder=(
        (r"^(model\.)?shared\.", "decoder.embed_tokens."),
        (r"^(model\.)?decoder\.", "decoder."),
        (r"^lm_head\.", "lm_head."),
        (r"^final_logits_bias$", "final_logits_bias"),
    ),
    shared=(r"^(model\.)?shared\.weight$",),
    tied=(("lm_head.weight", "decoder.embed_tokens.weight"),),
)


class BartTextEncoder(TextEncoder):
    keys: ClassVar[KeyMap] = KEYS
    stack_class: ClassVar[type[PreTrainedModel]] = BartEncoder

    @classmethod
    def max_rows(cls, config: PreTrainedConfig) -> int | None:
        return int(config.max_position_embeddings)

    def walk(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        stack: PreTrainedModel = self.module
        table = stack.embed_positions
        hidden = stack.layernorm_embedding(
            stack.embed_tokens(token_ids) + table.weight[positions + table.offset]
        )
        for layer in stack.layers:
            hidden = self.run_layer(layer, hidden, mask)
        rows: torch.Tensor = hidden
        return rows

    def run_layer(self, layer: PreTrainedModel, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[1, T, hidden] after one layer."""
        if hidden.dtype != torch.float16:
            rows: torch.Tensor = layer(hidden, mask)
            return rows
        # In float16 the layer asks whether all values are finite, which a captured graph cannot do.
        attended, _ = layer.self_attn(hidden, attention_mask=mask)
        hidden = layer.self_attn_layer_norm(hidden + attended)
        hidden = layer.final_layer_norm(hidden + layer.fc2(layer.activation_fn(layer.fc1(hidden))))
        maximum = torch.finfo(hidden.dtype).max - 1000
        return torch.where(torch.isfinite(hidden).all(), hidden, hidden.clamp(-maximum, maximum))


class BartTextDecoder(EncDecDecoder):
    keys: ClassVar[KeyMap] = KEYS
    stack_class: ClassVar[type[PreTrainedModel]] = BartDecoder

    def walk(self, hidden: torch.Tensor, positions: torch.Tensor, attention: object) -> torch.Tensor:
        stack = self.module.decoder
        table = stack.embed_positions
        hidden = stack.layernorm_embedding(hidden + table.weight[positions + table.offset])
        for layer in stack.layers:
            # The layer only asks whether there are encoder rows; its cross-attention does not want them.
            hidden = layer(hidden, None, hidden, attn_metadata=attention)
        return hidden


ENCODER: type[EncoderSide] = BartTextEncoder
DECODER: type[DecoderSide] = BartTextDecoder
