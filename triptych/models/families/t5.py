"""T5: text to text, no positions but a bias on the scores of self-attention, read from the first block."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack

from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.families.cross_attention import CrossAttention
from triptych.models.families.encdec import EncDecDecoder
from triptych.models.families.text_encoder import TextEncoder
from triptych.models.parallel.plan import Style
from triptych.models.weights.loading import KeyMap

#: Tokens of the decoder: the model itself counts none, its configs name what it was trained with.
_MAX_POSITIONS = 4096
_PROJECTIONS = ("q", "k", "v", "o")

KEYS = KeyMap(
    encoder=(
        (r"^shared\.", "embed_tokens."),
        (r"^encoder\.", ""),
    ),
    decoder=(
        (r"^shared\.", "decoder.embed_tokens."),
        (r"^decoder\.", "decoder."),
        (r"^lm_head\.", "lm_head."),
    ),
    shared=(r"^shared\.weight$",),
    tied=(("lm_head.weight", "decoder.embed_tokens.weight"),),
)


def relative_bias(attention: T5Attention) -> torch.Tensor:
    """Relative attention bias [heads, distances]: column d is for the key d positions before its query.

    The last column is for all greater distances.
    """
    farthest = int(attention.relative_attention_max_distance)
    weight = attention.relative_attention_bias.weight
    buckets = T5Attention._relative_position_bucket(
        -torch.arange(farthest + 1, device=weight.device),
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=farthest,
    )
    bias: torch.Tensor = weight[buckets].T.contiguous()
    return bias


class UnbiasedSelfAttention(nn.Module):
    """transformers' projections without its bias, which would be that of one unbroken sequence."""

    def __init__(self, original: T5Attention, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = int(config.d_kv)
        self.q, self.k, self.v, self.o = original.q, original.k, original.v, original.o
        if original.has_relative_attention_bias:
            self.relative_attention_bias = original.relative_attention_bias
            self.relative_attention_num_buckets = original.relative_attention_num_buckets
            self.relative_attention_max_distance = original.relative_attention_max_distance

    def forward(self, hidden: torch.Tensor, attention: object) -> torch.Tensor:
        """[1, T, hidden] to [1, T, hidden]."""
        shape = hidden.shape[:-1]
        # Each is called by its name: that is how those of one input are found.
        parts = self.q(hidden), self.k(hidden), self.v(hidden)
        query, key, value = (part.view(*shape, -1, self.head_dim).transpose(1, 2) for part in parts)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, query, key, value, None, scaling=1.0, attn_metadata=attention)
        result: torch.Tensor = self.o(out.reshape(*shape, -1))
        return result


class T5TextEncoder(TextEncoder):
    keys: ClassVar[KeyMap] = KEYS
    stack_class: ClassVar[type[PreTrainedModel]] = T5Stack

    @classmethod
    def stack(cls, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        config = copy.deepcopy(config)
        config.is_decoder = config.use_cache = False
        return super().stack(config, dtype)

    def walk(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        stack: PreTrainedModel = self.module
        bias = _bias_both_ways(stack.block[0].layer[0].SelfAttention, positions)
        # The mask is in the bias: releases of transformers differ in how they join the two.
        bias = torch.where(mask, bias, torch.finfo(bias.dtype).min)
        hidden = stack.embed_tokens(token_ids)
        for block in stack.block:
            hidden = block(hidden, position_bias=bias)[0]
        normed: torch.Tensor = stack.final_layer_norm(hidden)
        return normed


def _bias_both_ways(attention: T5Attention, positions: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, T] of positions [1, T], as the encoder has it: keys after a query have buckets too."""
    buckets = T5Attention._relative_position_bucket(
        positions[:, None, :] - positions[:, :, None],
        bidirectional=True,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    bias: torch.Tensor = attention.relative_attention_bias(buckets)
    return bias.permute(0, 3, 1, 2)


class T5TextDecoder(EncDecDecoder):
    shard_rules: ClassVar[tuple[tuple[str, Style], ...]] = (
        (r".+Attention\.[qkv]", Style.HEADS),
        (r".+Attention\.relative_attention_bias", Style.HEADS),
        (r".+Attention\.o", Style.HEADS_ROW),
        (r".+\.DenseReluDense\.wi(_[01])?", Style.COLUMN),
        (r".+\.DenseReluDense\.wo", Style.ROW),
    )
    keys: ClassVar[KeyMap] = KEYS
    stack_class: ClassVar[type[PreTrainedModel]] = T5Stack

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias = relative_bias(self.module.decoder.block[0].layer[0].SelfAttention)

    @classmethod
    def stack(cls, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        config = copy.deepcopy(config)
        config.is_decoder = True
        config.num_layers = config.num_decoder_layers
        stack = super().stack(config, dtype)
        for index, block in enumerate(stack.block):
            inner = block.layer[0]
            inner.SelfAttention = UnbiasedSelfAttention(inner.SelfAttention, stack.config, index)
        return stack

    @classmethod
    def replace_cross_attention(cls, stack: PreTrainedModel) -> None:
        for index, block in enumerate(stack.block):
            block.layer[1].EncDecAttention = CrossAttention(
                block.layer[1].EncDecAttention,
                layer_idx=index,
                head_dim=stack.config.d_kv,
                scaling=1.0,
                config=stack.config,
                names=_PROJECTIONS,
            )

    def cross_modules(self) -> list[CrossAttention]:
        return [block.layer[1].EncDecAttention for block in self.module.decoder.block]

    def walk(self, hidden: torch.Tensor, positions: torch.Tensor, attention: object) -> torch.Tensor:
        for block in self.module.decoder.block:
            own, cross, feed_forward = block.layer
            hidden = hidden + own.SelfAttention(own.layer_norm(hidden), attention)
            attended, _ = cross.EncDecAttention(cross.layer_norm(hidden), attn_metadata=attention)
            hidden = feed_forward(hidden + attended)
        normed: torch.Tensor = self.module.decoder.final_layer_norm(hidden)
        return normed

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.scale_decoder_outputs:
            hidden = hidden * self.config.d_model**-0.5
        return super().logits(hidden)

    def start_token(self) -> int:
        first = self.generation.extra.get("decoder_start_token_id")
        for value in (first, getattr(self.config, "decoder_start_token_id", None), self.config.pad_token_id):
            if value is not None:
                return int(value)
        return 0

    @classmethod
    def heads(cls, config: PreTrainedConfig) -> tuple[int, int]:
        return int(config.num_heads), int(config.d_kv)

    @classmethod
    def num_layers(cls, config: PreTrainedConfig) -> int:
        return int(config.num_decoder_layers)

    @classmethod
    def max_rows(cls, config: PreTrainedConfig) -> int | None:
        return None

    @classmethod
    def max_positions(cls, config: PreTrainedConfig) -> int:
        return max(_MAX_POSITIONS, int(getattr(config, "n_positions", 0)))


ENCODER: type[EncoderSide] = T5TextEncoder
DECODER: type[DecoderSide] = T5TextDecoder
