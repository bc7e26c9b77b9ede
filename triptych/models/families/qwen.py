"""The encoder side that Qwen2.5-VL and Qwen3-VL share: patch grids and pixel limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from triptych.base.errors import InvalidRequest
from triptych.base.types import JsonObject, Options
from triptych.models.base import Media, PreparedItem
from triptych.models.families.qwen_graph import QwenGraph
from triptych.models.generic.override import EncoderOverride
from triptych.models.generic.sides import base_of
from triptych.models.images import check_known, is_count


def _is_size(value: object) -> bool:
    limits = ("shortest_edge", "longest_edge")
    return isinstance(value, Mapping) and set(value) <= set(limits) and all(map(is_count, value.values()))


_LEVELS = "pixel_levels"
#: Inputs of pictures, and of videos, whose patches are those of pairs of frames.
_PIXELS = ("pixel_values", _LEVELS, "pixel_values_videos")
_OPTIONS = {"min_pixels": is_count, "max_pixels": is_count, "size": _is_size}


class QwenEncoder(EncoderOverride, QwenGraph):
    """The tower of a Qwen checkpoint. A row is one merged patch."""

    def prepare(self) -> None:
        self.tower: Any = base_of(self.module).visual
        self.vision_config = self.config.vision_config
        self.merge_size = int(self.vision_config.spatial_merge_size)
        self._recipe = self.images.patch_recipe()

    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        limits = self._limits(options)
        if self._recipe is not None:
            name, (pixels, grid) = _LEVELS, self._recipe.levels(media, limits.get("size"))
        else:
            inputs = self.images(media, limits)
            name, pixels = "pixel_values", inputs["pixel_values"]
            grid = tuple(inputs["image_grid_thw"][0].tolist())
        patches = math.prod(grid)
        merged = patches // self.merge_size**2
        return PreparedItem(merged, merged, grid, cost=patches, tensors={name: pixels})

    def pixels(self, items: Sequence[PreparedItem]) -> torch.Tensor:
        """[patches of all items, elements of a patch] on the tower's device and in its dtype."""
        parts = []
        for name, group in groupby(
            items, lambda item: next((n for n in _PIXELS if n in item.tensors), _LEVELS)
        ):
            pixels = torch.cat([item.tensors[name] for item in group])
            if name == _LEVELS:
                assert self._recipe is not None
                pixels = self._recipe.values(pixels, self.device, self.dtype)
            parts.append(pixels.to(self.device, self.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def inputs(self, items: Sequence[PreparedItem]) -> dict[str, torch.Tensor]:
        grids = torch.tensor([item.grid_thw for item in items], device=self.device)
        return {"pixel_values": self.pixels(items), "image_grid_thw": grids}

    def _batch_key(self, item: PreparedItem) -> object:
        return None

    def _limits(self, options: Options) -> JsonObject:
        """Options as one `size`; a request may shrink what the checkpoint allows, never exceed it."""
        check_known(options, _OPTIONS)
        if not options:
            return {}
        own = dict(self.images.get("size") or {})
        asked = dict(options.get("size", {}))
        shortest = options.get("min_pixels", asked.get("shortest_edge", own["shortest_edge"]))
        longest = options.get("max_pixels", asked.get("longest_edge", own["longest_edge"]))
        if longest > own["longest_edge"]:
            name = "max_pixels" if "max_pixels" in options else "size"
            raise InvalidRequest(
                f"{name} {longest} exceeds this model's limit of {own['longest_edge']} pixels",
                param=f"mm_processor_kwargs.{name}",
            )
        if "min_pixels" not in options and "shortest_edge" not in asked:
            shortest = min(shortest, longest)
        if shortest > longest:
            name = "min_pixels" if "min_pixels" in options else "size"
            raise InvalidRequest(
                f"{name}: at least {shortest} pixels cannot be at most {longest}",
                param=f"mm_processor_kwargs.{name}",
            )
        return {"size": {"shortest_edge": shortest, "longest_edge": longest}}
