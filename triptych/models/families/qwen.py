"""The parts that Qwen2.5-VL and Qwen3-VL share: patch grids, pixel limits and M-RoPE positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from triptych.base.errors import InvalidRequest
from triptych.base.types import ItemPlan, JsonObject, MMFeature, Options
from triptych.models.base import Media, PreparedItem, PromptInputs
from triptych.models.families.qwen_graph import QwenGraph
from triptych.models.generic.layout import ItemLayout
from triptych.models.generic.override import DecoderOverride, EncoderOverride
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


class QwenDecoder(DecoderOverride):
    """Text model with positions in time, row and column.

    They are computed without the class's forward, which takes about 0.6 ms a prompt longer.
    """

    @property
    def merge_size(self) -> int:
        """Patches merged into one embedding, along each side."""
        return int(self.config.vision_config.spatial_merge_size)

    def layout_of(self, plan: ItemPlan) -> ItemLayout:
        if plan.layout:
            return super().layout_of(plan)  # of a video
        grid, merge = plan.grid_thw, self.merge_size
        if len(grid) != 3 or min(grid) < 1 or grid[1] % merge or grid[2] % merge:
            raise InvalidRequest(f"item {plan.mm_hash} has an impossible grid {tuple(grid)}", param="plan")
        rows = math.prod(grid) // merge**2
        # Before anything of its size is made: a forged grid may be of any.
        if not rows == plan.rows == plan.length:
            raise InvalidRequest(
                f"item {plan.mm_hash} has {plan.rows} rows, but its grid {tuple(grid)} takes {rows}",
                param="plan",
            )
        return ItemLayout((self.token_ids["image"],) * rows, ((1,),) * rows, {0: torch.tensor([grid])})

    def prompt_inputs(self, token_ids: Sequence[int], features: Sequence[MMFeature]) -> PromptInputs:
        if any(feature.plan.layout for feature in features):
            return super().prompt_inputs(token_ids, features)
        return PromptInputs(*mrope_positions(len(token_ids), features, self.merge_size))


def mrope_positions(length: int, features: Sequence[MMFeature], merge_size: int) -> tuple[torch.Tensor, int]:
    """Positions [3, length] (time, row, column) of a prompt, int64, and the delta of what follows it.

    An image of t x h x w merged patches starts at the next text position p: its rows run p … p + h - 1,
    its columns p … p + w - 1; text goes on at p + max(h, w).
    """
    parts: list[torch.Tensor] = []
    index = position = 0
    for feature in sorted(features, key=lambda feature: feature.placement.offset):
        offset = feature.placement.offset
        parts.append(_text(position, offset - index))
        position += offset - index
        frames, rows, columns = feature.plan.grid_thw
        rows, columns = rows // merge_size, columns // merge_size
        grid = torch.meshgrid(torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(torch.stack(grid).reshape(3, -1) + position)
        position += max(rows, columns)
        index = offset + feature.placement.length
    parts.append(_text(position, length - index))
    position += length - index
    return torch.cat(parts, dim=1), position - length


def _text(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count).expand(3, -1)
