"""The override of a family: the adapter's encoder of a class whose tower's keys are known.

The tower alone is read, and pictures are prepared by the checkpoint's image processor alone. Everything else,
the whole decoder with it, is the adapter's.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from triptych.base.types import JsonObject
from triptych.models.checkpoint.config import load_config
from triptych.models.checkpoint.tensors import Checkpoint
from triptych.models.generic.capture import modality_tokens
from triptych.models.generic.encoder import GenericEncoder
from triptych.models.generic.examine import Examined, deepstack_levels, examine
from triptych.models.generic.processor import GenericProcessor
from triptych.models.generic.sides import class_of, keep_encoder
from triptych.models.images import ImageProcessor
from triptych.models.video.loading import video_settings
from triptych.models.weights.loading import KeyMap, empty_module, load_into


def _empty_tower(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The encoder side of a class, on meta but for what is computed."""

    def build() -> PreTrainedModel:
        model = class_of(config)._from_config(config, dtype=dtype, attn_implementation="sdpa")
        keep_encoder(model)
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
        config: Any = load_config(path)
        images = ImageProcessor(path)
        module = _empty_tower(config, dtype)
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
