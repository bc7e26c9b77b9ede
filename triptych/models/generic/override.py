"""The override of a family: the adapter's sides of a class whose checkpoint keys and layers are known.

Loading by keys divides a decoder among ranks and holds linear layers in 8 bits; fused layers, packed weights
and encoder graphs are faster. Everything else is the adapter's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from triptych.base.types import JsonObject
from triptych.models.checkpoint.config import load_config
from triptych.models.checkpoint.tensors import Checkpoint
from triptych.models.generic.capture import modality_tokens
from triptych.models.generic.decoder import GenericDecoder
from triptych.models.generic.encoder import GenericEncoder
from triptych.models.generic.examine import Examined, deepstack_levels, examine
from triptych.models.generic.processor import GenericProcessor
from triptych.models.generic.sides import class_of, keep_decoder, keep_encoder
from triptych.models.images import ImageProcessor
from triptych.models.parallel.plan import HEAD, WHOLE, ShardPlan, rules_of_transformers
from triptych.models.parallel.sharding import load_share
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.video.loading import video_settings
from triptych.models.weights.loading import KeyMap, empty_module, load_into

#: Where transformers' classes have their text model.
TEXT = "model.language_model."
#: A head without a weight of its own is the token embedding.
TIED = (("lm_head.weight", f"{TEXT}embed_tokens.weight"),)


def empty_side(
    config: PreTrainedConfig, dtype: torch.dtype, keep: Callable[[PreTrainedModel], None]
) -> PreTrainedModel:
    """One side of a class, on meta but for what is computed."""

    def build() -> PreTrainedModel:
        model = class_of(config)._from_config(config, dtype=dtype, attn_implementation="sdpa")
        keep(model)
        return model

    module = empty_module(build)
    assert isinstance(module, PreTrainedModel)
    return module


class EncoderOverride(GenericEncoder):
    """A tower with its checkpoint's image processor."""

    keys: ClassVar[KeyMap]
    images: ImageProcessor
    _path: Path

    @cached_property
    def _examined(self) -> Examined:  # type: ignore[override]
        """Of the class, for videos."""
        return examine(load_config(self._path))

    @cached_property
    def _processor(self) -> GenericProcessor:  # type: ignore[override]
        """The checkpoint's whole processor, for videos."""
        return GenericProcessor(self._path, modality_tokens(self.config), self._examined.type_names)

    @classmethod
    def load(cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False) -> Self:
        checkpoint = Checkpoint(path)
        cls.keys.check(checkpoint.files)
        config: Any = load_config(path)
        images = ImageProcessor(path)
        module = empty_side(config, dtype, keep_encoder)
        names = cls.keys.encoder_names(checkpoint.files)
        load_into(module, checkpoint, names, device=device, dtype=dtype, quantize=quantize)
        levels = deepstack_levels(config)
        side = cls(module, config.text_config.hidden_size, levels, device=device, dtype=dtype)
        side.images = images
        side._path = path
        side.prepare()
        return side

    @classmethod
    def has_known_keys(cls, path: Path, keys: KeyMap) -> bool:
        return True

    def prepare(self) -> None:
        """Reads what the family needs of the loaded tower."""

    @classmethod
    def processor_config(cls, path: Path) -> JsonObject:
        videos = video_settings(path)
        return {**ImageProcessor(path).config, **({"video": videos} if videos else {})}


class DecoderOverride(GenericDecoder):
    """A text model after Llama's pattern: token embeddings, rotary positions, layers, a norm."""

    keys: ClassVar[KeyMap]

    @classmethod
    def load_module(
        cls,
        path: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        quantize: bool,
        parallel: TensorParallel | None,
    ) -> PreTrainedModel:
        checkpoint = Checkpoint(path)
        cls.keys.check(checkpoint.files)
        config: Any = cls.read_config(path)
        module = empty_side(config, dtype, keep_decoder)
        load_share(
            module,
            checkpoint,
            cls.keys.decoder_names(checkpoint.files),
            plan=cls.shard_plan(config.text_config),
            parallel=parallel,
            device=device,
            dtype=dtype,
            tied=cls.keys.tied if config.tie_word_embeddings else (),
            quantize=quantize,
        )
        return module

    @classmethod
    def shard_plan(cls, config: PreTrainedConfig) -> ShardPlan:
        """How ranks divide the text model of `config`, and its head."""
        return ShardPlan(
            (*rules_of_transformers(cls.tp_plan(config), TEXT), *WHOLE, HEAD),
            heads=int(config.num_attention_heads),
            kv_heads=int(config.num_key_value_heads),
        )

    @classmethod
    def tp_plan(cls, config: PreTrainedConfig) -> Mapping[str, str]:
        """transformers' own plan for the text model's layers."""
        return config.base_model_tp_plan or {}
