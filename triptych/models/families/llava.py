"""LLaVA-1.5: a CLIP tower with a projector behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from transformers import PreTrainedConfig

from triptych.base.errors import InvalidRequest
from triptych.base.types import Options
from triptych.models.base import DecoderSide, EncoderSide, Media, PreparedItem
from triptych.models.generic.decoder import GenericDecoder
from triptych.models.generic.encoder import FixedSizeImages
from triptych.models.generic.override import EncoderOverride
from triptych.models.images import check_known, check_resized, is_count
from triptych.models.weights.loading import KeyMap

KEYS = KeyMap(
    encoder=(
        (r"^(model\.)?vision_tower\.(vision_model\.)?", "model.vision_tower."),
        (r"^(model\.)?multi_modal_projector\.", "model.multi_modal_projector."),
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


class LlavaEncoder(FixedSizeImages, EncoderOverride):
    """A row is one patch; the class token is dropped where the checkpoint says so."""

    keys: ClassVar[KeyMap] = KEYS

    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        pads = self.images.get("do_pad") is not None
        check_known(options, {name: kind for name, kind in _OPTIONS.items() if pads or name != "do_pad"})
        check_resized(media, options, self.images.get("size"))
        pixels = self.images(media, options)["pixel_values"]
        if pixels.shape[-2:] != (self.side, self.side):
            height, width = pixels.shape[-2:]
            raise InvalidRequest(
                f"the options give {width}x{height} pixels where this model takes {self.side}x{self.side}",
                param="mm_processor_kwargs" if options else "image",
            )
        rows = rows_per_image(self.config)
        tensors = {"pixel_values": pixels}
        return PreparedItem(rows, rows, grid_thw=(), cost=patches(self.config), tensors=tensors)

    @property
    def side(self) -> int:
        """Pixels along each side of what the tower takes."""
        return int(self.config.vision_config.image_size)


def patches(config: PreTrainedConfig) -> int:
    """Patches of one image; CLIP takes one size only."""
    return int((config.vision_config.image_size // config.vision_config.patch_size) ** 2)


def rows_per_image(config: PreTrainedConfig) -> int:
    """Embeddings of one image: its patches, and the class token where it is kept."""
    return patches(config) + int(config.vision_feature_select_strategy != "default")


ENCODER: type[EncoderSide] = LlavaEncoder
DECODER: type[DecoderSide] = GenericDecoder
