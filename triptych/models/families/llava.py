"""LLaVA-1.5: a CLIP tower with a projector behind it, a Llama that counts positions in one dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import torch
from PIL import Image
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.clip.modeling_clip import CLIPVisionModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.types import ItemPlan, MMFeature, Options
from triptych.models.base import DecoderSide, EncoderSide, Media, PreparedItem
from triptych.models.checkpoint.folder import Checkpoint
from triptych.models.families.fixed_size import FixedSizeEncoder
from triptych.models.families.text import TextDecoder, load_config, one_dimensional
from triptych.models.images import ImageProcessor, check_known, is_count
from triptych.models.weights.loading import KeyMap, empty_module, load_into

KEYS = KeyMap(
    encoder=(
        (r"^(model\.)?vision_tower\.(vision_model\.)?", "vision_tower."),
        (r"^(model\.)?multi_modal_projector\.", "multi_modal_projector."),
    ),
    decoder=(
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^(model\.language_model|language_model\.model)\.", "model."),
        (r"^lm_head\.", "lm_head."),
    ),
)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_size(value: object) -> bool:
    sides = {"shortest_edge", "height", "width"}
    return is_count(value) or (
        isinstance(value, Mapping) and set(value) <= sides and all(map(is_count, value.values()))
    )


_OPTIONS = {
    "size": _is_size,
    "crop_size": _is_size,
    "do_resize": _is_flag,
    "do_center_crop": _is_flag,
    "do_pad": _is_flag,
}


#: Pixels of an image between resize and crop.
_MOST_RESIZED = 1 << 26


class VisionModule(nn.Module):
    """Tower and projector: all that an encoder worker holds of a checkpoint."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.vision_tower = CLIPVisionModel._from_config(
            config.vision_config, dtype=dtype, attn_implementation="sdpa"
        )
        self.multi_modal_projector = LlavaMultiModalProjector(config)


class LlavaEncoder(FixedSizeEncoder):
    """A row is one patch; the class token is dropped where the checkpoint says so."""

    keys: ClassVar[KeyMap] = KEYS
    input_name: ClassVar[str] = "pixel_values"

    def __init__(
        self,
        config: PreTrainedConfig,
        module: VisionModule,
        images: ImageProcessor,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.module: VisionModule = module
        self.device = device
        self.dtype = dtype
        self.width = int(config.text_config.hidden_size)
        self._config = config
        self._images = images
        self._side = int(config.vision_config.image_size)
        layers = config.vision_feature_layer
        self._layers: list[int] = [layers] if isinstance(layers, int) else list(layers)

    @classmethod
    def load(cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False) -> Self:
        checkpoint = Checkpoint(path)
        cls.keys.check(checkpoint.files)
        config = checked_config(path)
        images = ImageProcessor(path)
        module = empty_module(lambda: VisionModule(config, dtype))
        assert isinstance(module, VisionModule)
        names = cls.keys.encoder_names(checkpoint.files)
        load_into(module, checkpoint, names, device=device, dtype=dtype, quantize=quantize)
        return cls(config, module, images, device=device, dtype=dtype)

    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        check_known(options, {name: kind for name, kind in _OPTIONS.items() if self._knows(name)})
        self._check_resized(media, options)
        pixels = self._images(media, options)["pixel_values"]
        if pixels.shape[-2:] != (self._side, self._side):
            height, width = pixels.shape[-2:]
            raise InvalidRequest(
                f"the options give {width}x{height} pixels where this model takes {self._side}x{self._side}",
                param="mm_processor_kwargs" if options else "image",
            )
        rows = rows_per_image(self._config)
        return PreparedItem(
            rows=rows, length=rows, grid_thw=(), cost=patches(self._config), tensors={"pixel_values": pixels}
        )

    def _check_resized(self, image: Image.Image, options: Options) -> None:
        """The processor resizes before it crops: a narrow image, or a large size, would fill the memory."""
        size = options.get("size", self._images.get("size"))
        sides = {"shortest_edge": size} if isinstance(size, int) else dict(size or {})
        edge = sides.get("shortest_edge")
        if edge:
            pixels = edge * edge * max(image.size) / min(image.size)
        else:
            pixels = (sides.get("height") or 1) * (sides.get("width") or 1)
        if pixels > _MOST_RESIZED:
            raise InvalidRequest(
                f"image: {image.width}x{image.height} would be resized to {pixels:.0f} pixels, more than "
                f"{_MOST_RESIZED}: send an image with a smaller aspect ratio, or a smaller size",
                param="mm_processor_kwargs.size" if "size" in options else "image",
            )

    @property
    def rows_per_item(self) -> int:
        return rows_per_image(self._config)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (int(self._config.vision_config.num_channels), self._side, self._side)

    def compute(self, inputs: torch.Tensor) -> torch.Tensor:
        out = self.module.vision_tower(inputs, output_hidden_states=True)
        chosen = [out.hidden_states[layer] for layer in self._layers]
        if self._config.vision_feature_select_strategy == "default":
            chosen = [hidden[:, 1:] for hidden in chosen]
        rows: torch.Tensor = self.module.multi_modal_projector(torch.cat(chosen, dim=-1))
        return rows

    def _knows(self, option: str) -> bool:
        return option != "do_pad" or self._images.get("do_pad") is not None


class LlavaDecoder(TextDecoder):
    """Every image takes the same number of tokens, counted like text."""

    keys: ClassVar[KeyMap] = KEYS

    @classmethod
    def read_config(cls, path: Path) -> PreTrainedConfig:
        return checked_config(path)

    @classmethod
    def text_model(cls, config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
        model: nn.Module = LlamaModel._from_config(config, dtype=dtype, attn_implementation="sdpa")
        return model

    def rows_of(self, plan: ItemPlan) -> int:
        return rows_per_image(self.config)

    def positions(self, token_ids: Sequence[int], features: Sequence[MMFeature]) -> tuple[torch.Tensor, int]:
        return one_dimensional(len(token_ids))


def checked_config(path: Path) -> PreTrainedConfig:
    """The config; ConfigError for a LLaVA of other parts than CLIP and Llama."""
    config = load_config(path)
    parts = (config.vision_config.model_type, config.text_config.model_type)
    if parts != ("clip_vision_model", "llama"):
        raise ConfigError(
            f"MODEL={path} joins {parts[0]} and {parts[1]}: of the LLaVA kind only LLaVA-1.5 "
            "(clip_vision_model and llama) is supported"
        )
    return config


def patches(config: PreTrainedConfig) -> int:
    """Patches of one image; CLIP takes one size only."""
    return int((config.vision_config.image_size // config.vision_config.patch_size) ** 2)


def rows_per_image(config: PreTrainedConfig) -> int:
    """Embeddings of one image: its patches, and the class token where it is kept."""
    return patches(config) + int(config.vision_feature_select_strategy != "default")


ENCODER: type[EncoderSide] = LlavaEncoder
DECODER: type[DecoderSide] = LlavaDecoder
