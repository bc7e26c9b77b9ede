"""TrOCR: a ViT encodes the picture of a line of text, a decoder like BART's attends to it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.trocr.modeling_trocr import TrOCRAttention, TrOCRDecoder
from transformers.models.vit.modeling_vit import ViTModel

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.types import Options
from triptych.models.base import DecoderSide, EncoderSide, Media, PreparedItem
from triptych.models.checkpoint.config import load_config
from triptych.models.checkpoint.tensors import Checkpoint
from triptych.models.families.encdec import EncDecDecoder
from triptych.models.families.fixed_size import FixedSizeEncoder
from triptych.models.images import ImageProcessor, check_known
from triptych.models.weights.loading import KeyMap, empty_module, load_into

#: The hub's names inside a ViT layer, and those of today's transformers.
_HUB_LAYER = (
    (r"attention\.attention\.query\.", "attention.q_proj."),
    (r"attention\.attention\.key\.", "attention.k_proj."),
    (r"attention\.attention\.value\.", "attention.v_proj."),
    (r"attention\.output\.dense\.", "attention.o_proj."),
    (r"intermediate\.dense\.", "mlp.fc1."),
    (r"output\.dense\.", "mlp.fc2."),
    ("", ""),
)
KEYS = KeyMap(
    encoder=(
        *((rf"^encoder\.encoder\.layer\.(\d+)\.{hub}", rf"layers.\1.{name}") for hub, name in _HUB_LAYER),
        (r"^encoder\.", ""),
    ),
    decoder=(
        (r"^decoder\.model\.decoder\.", "decoder."),
        (r"^decoder\.output_projection\.", "lm_head."),
    ),
    tied=(("lm_head.weight", "decoder.embed_tokens.weight"),),
)


class TrOCREncoder(FixedSizeEncoder):
    """A row is one patch, the class token before them; every picture is brought to one size."""

    keys: ClassVar[KeyMap] = KEYS
    input_name: ClassVar[str] = "pixel_values"

    def __init__(
        self,
        config: PreTrainedConfig,
        module: nn.Module,
        images: ImageProcessor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.module = module
        self.device = device
        self.dtype = dtype
        self.width = int(config.encoder.hidden_size)
        self._rows = rows_of(config)
        self._channels = int(config.encoder.num_channels)
        self._side = int(config.encoder.image_size)
        self._images = images

    @classmethod
    def load(cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False) -> Self:
        checkpoint = Checkpoint(path)
        cls.keys.check(checkpoint.files)
        config = checked_config(path)
        names = cls.keys.encoder_names(checkpoint.files)
        pooled = any(name.startswith("pooler.") for name in names.values())

        def build() -> nn.Module:
            tower: nn.Module = ViTModel._from_config(
                config.encoder, dtype=dtype, attn_implementation="sdpa", add_pooling_layer=pooled
            )
            return tower

        module = empty_module(build)
        load_into(module, checkpoint, names, device=device, dtype=dtype, quantize=quantize)
        return cls(config, module, ImageProcessor(path), device, dtype)

    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        check_known(options, {})
        pixels = self._images(media, {})["pixel_values"]
        if pixels.shape[-2:] != (self._side, self._side):
            raise InvalidRequest(
                f"the image became {tuple(pixels.shape[-2:])} where the tower takes {self._side}",
                param="image",
            )
        return PreparedItem(
            rows=self._rows, length=0, grid_thw=(), cost=self._rows, tensors={"pixel_values": pixels}
        )

    @property
    def rows_per_item(self) -> int:
        return self._rows

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self._channels, self._side, self._side)

    def compute(self, inputs: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.module(inputs).last_hidden_state
        return rows


class PagedSelfAttention(nn.Module):
    """Self-attention through the registered attention function, which transformers' own module skips."""

    def __init__(self, original: TrOCRAttention, config: PreTrainedConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = int(original.head_dim)
        self.scaling = float(original.scaling)
        self.q_proj, self.k_proj = original.q_proj, original.k_proj
        self.v_proj, self.out_proj = original.v_proj, original.out_proj

    def forward(self, hidden_states: torch.Tensor, attention: object) -> torch.Tensor:
        """[1, T, hidden] to [1, T, hidden]; the query is scaled, as transformers does it here."""
        shape = hidden_states.shape[:-1]
        parts = (
            self.q_proj(hidden_states) * self.scaling,
            self.k_proj(hidden_states),
            self.v_proj(hidden_states),
        )
        query, key, value = (part.view(*shape, -1, self.head_dim).transpose(1, 2) for part in parts)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, query, key, value, None, scaling=1.0, attn_metadata=attention)
        result: torch.Tensor = self.out_proj(out.reshape(*shape, -1))
        return result


class TrOCRTextDecoder(EncDecDecoder):
    modality: ClassVar[str] = "image"
    scale_query: ClassVar[bool] = True
    keys: ClassVar[KeyMap] = KEYS

    @classmethod
    def read_config(cls, path: Path) -> PreTrainedConfig:
        config = checked_config(path)
        text = config.decoder
        text.encoder_rows = rows_of(config)
        text.decoder_start_token_id = config.decoder_start_token_id or text.decoder_start_token_id
        return text

    @classmethod
    def stack(cls, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        stack: PreTrainedModel = TrOCRDecoder._from_config(config, dtype=dtype)
        for index, layer in enumerate(stack.layers):
            layer.self_attn = PagedSelfAttention(layer.self_attn, stack.config, index)
        return stack

    def walk(self, hidden: torch.Tensor, positions: torch.Tensor, attention: object) -> torch.Tensor:
        stack = self.module.decoder
        table = stack.embed_positions
        hidden = hidden + table.weight[positions + table.offset]
        if stack.layernorm_embedding is not None:
            hidden = stack.layernorm_embedding(hidden)
        for layer in stack.layers:
            hidden = layer.self_attn_layer_norm(hidden + layer.self_attn(hidden, attention))
            attended, _ = layer.encoder_attn(hidden, attn_metadata=attention)
            hidden = layer.encoder_attn_layer_norm(hidden + attended)
            wide = layer.activation_fn(layer.fc1(hidden))
            hidden = layer.final_layer_norm(hidden + layer.fc2(wide))
        return hidden

    @classmethod
    def cross_width(cls, config: PreTrainedConfig) -> int:
        return int(config.cross_attention_hidden_size or config.d_model)

    @classmethod
    def max_rows(cls, config: PreTrainedConfig) -> int | None:
        return int(config.encoder_rows)


def checked_config(path: Path) -> PreTrainedConfig:
    """The config; ConfigError for a pair of other parts than a ViT and a TrOCR decoder that fit."""
    config = load_config(path)
    text = config.decoder
    parts = (config.encoder.model_type, text.model_type)
    if parts != ("vit", "trocr") or not text.use_learned_position_embeddings:
        raise ConfigError(
            f"MODEL={path} joins {parts[0]} and {parts[1]}: of this kind only ViT with TrOCR and learned "
            "positions is supported"
        )
    if (text.cross_attention_hidden_size or text.d_model) != config.encoder.hidden_size:
        raise ConfigError(f"MODEL={path} projects its tower's rows: only rows as they are are supported")
    return config


def rows_of(config: PreTrainedConfig) -> int:
    """Rows of every picture: its patches and the class token."""
    return int((config.encoder.image_size // config.encoder.patch_size) ** 2 + 1)


ENCODER: type[EncoderSide] = TrOCREncoder
DECODER: type[DecoderSide] = TrOCRTextDecoder
