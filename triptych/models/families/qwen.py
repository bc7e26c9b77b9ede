"""The parts that Qwen2.5-VL and Qwen3-VL share: patch grids, pixel limits and M-RoPE positions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput

from triptych.base.errors import InvalidRequest
from triptych.base.machine.device_memory import host_empty
from triptych.base.types import ItemPlan, JsonObject, MMFeature, Options
from triptych.models.base import EncoderSide, Media, PreparedItem
from triptych.models.checkpoint.folder import Checkpoint
from triptych.models.families.qwen_graph import QwenGraph
from triptych.models.families.segments import SegmentAttention
from triptych.models.families.text import TextDecoder, load_config, rows_of_grid
from triptych.models.images import ImageProcessor, check_known, is_count
from triptych.models.weights.loading import KeyMap, empty_module, load_into


def _is_size(value: object) -> bool:
    limits = ("shortest_edge", "longest_edge")
    return isinstance(value, Mapping) and set(value) <= set(limits) and all(map(is_count, value.values()))


_OPTIONS = {"min_pixels": is_count, "max_pixels": is_count, "size": _is_size}


class PatchLinear(nn.Module):
    """A patch embedding as one matrix product, several times as fast as the convolution that it replaces.

    The convolution's kernel and stride are one patch, so that no output depends on a neighbour.

    Takes [patches, channels, *patch] and gives [patches, out, 1, ...], as the convolution does.
    """

    def __init__(self, original: nn.Conv3d) -> None:
        super().__init__()
        if original.kernel_size != original.stride or any(original.padding) or original.groups != 1:
            raise ValueError(f"{original} looks beyond one patch")
        self.weight, self.bias = original.weight, original.bias

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        rows = functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return rows.view(*rows.shape, *(1 for _ in patches.shape[2:]))


class QwenEncoder(QwenGraph, EncoderSide):
    """The tower of a Qwen checkpoint. A row is one merged patch."""

    keys: ClassVar[KeyMap]

    def __init__(
        self,
        config: PreTrainedConfig,
        module: nn.Module,
        images: ImageProcessor,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.module = module
        self.device = device
        self.dtype = dtype
        self.vision_config = config.vision_config
        self.merge_size = int(config.vision_config.spatial_merge_size)
        self.width = self.row_width(config.vision_config)
        self._images = images
        self._recipe = images.patch_recipe()

    @classmethod
    def load(cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False) -> Self:
        checkpoint = Checkpoint(path)
        cls.keys.check(checkpoint.files)
        config = load_config(path)
        images = ImageProcessor(path)
        module = empty_module(lambda: cls.tower(config.vision_config, dtype))
        names = cls.keys.encoder_names(checkpoint.files)
        load_into(module, checkpoint, names, device=device, dtype=dtype, quantize=quantize)
        embed = module.get_submodule("patch_embed")
        assert isinstance(embed.proj, nn.Conv3d)
        embed.proj = PatchLinear(embed.proj)
        for block in module.blocks:  # type: ignore[union-attr]
            block.attn = SegmentAttention(block.attn)
        return cls(config, module, images, device=device, dtype=dtype)

    @classmethod
    @abstractmethod
    def tower(cls, config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
        """The family's vision model, without weights."""

    @classmethod
    def row_width(cls, config: PreTrainedConfig) -> int:
        """Elements of one row."""
        return int(config.out_hidden_size)

    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        limits = self._limits(options)
        if self._recipe is not None:
            name, (pixels, grid) = "pixel_levels", self._recipe.levels(media, limits.get("size"))
        else:
            inputs = self._images(media, limits)
            name, pixels = "pixel_values", inputs["pixel_values"]
            grid = tuple(inputs["image_grid_thw"][0].tolist())
        patches = math.prod(grid)
        merged = patches // self.merge_size**2
        return PreparedItem(
            rows=merged,
            length=merged,
            grid_thw=grid,
            cost=patches,
            tensors={name: pixels},
        )

    def pixels(self, items: Sequence[PreparedItem]) -> torch.Tensor:
        """[patches of all items, elements of a patch] on the tower's device and in its dtype."""
        if self._recipe is None:
            return torch.cat([item.tensors["pixel_values"] for item in items]).to(self.device, self.dtype)
        levels = torch.cat([item.tensors["pixel_levels"] for item in items])
        return self._recipe.values(levels, self.device, self.dtype)

    @torch.no_grad()
    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        grids = torch.tensor([item.grid_thw for item in items], device=self.device)
        out = self.module(self.pixels(items), grid_thw=grids)
        columns = self.columns(out)
        counts = [item.rows for item in items]
        parts = zip(*(torch.split(column, counts) for column in columns), strict=True)
        return [self._joined(levels) for levels in parts]

    def _joined(self, levels: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """A copy even of a single level: an item must not keep the whole batch alive."""
        if self.device.type != "cpu":
            return torch.cat(levels, dim=-1)
        shape = (len(levels[0]), sum(level.shape[-1] for level in levels))
        return torch.cat(levels, dim=-1, out=host_empty(shape, levels[0].dtype))

    def columns(self, out: ModelOutput) -> list[torch.Tensor]:
        """The tower's outputs that make up a row, each [all rows, out_hidden_size]."""
        return [out.pooler_output]

    def _limits(self, options: Options) -> JsonObject:
        """Options as one `size`; a request may shrink what the checkpoint allows, never exceed it."""
        check_known(options, _OPTIONS)
        if not options:
            return {}
        own = dict(self._images.get("size") or {})
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


class QwenDecoder(TextDecoder):
    """Text model with positions in time, row and column."""

    position_rows: ClassVar[int] = 3

    @property
    def merge_size(self) -> int:
        """Patches merged into one embedding, along each side."""
        return int(self.config.vision_config.spatial_merge_size)

    def rows_of(self, plan: ItemPlan) -> int:
        return rows_of_grid(plan.grid_thw, plan, self.merge_size)

    def positions(self, token_ids: Sequence[int], features: Sequence[MMFeature]) -> tuple[torch.Tensor, int]:
        return mrope_positions(len(token_ids), features, self.merge_size)


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
        frames, rows, columns = merged_grid(feature.plan.grid_thw, merge_size)
        grid = torch.meshgrid(torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(torch.stack(grid).reshape(3, -1) + position)
        position += max(rows, columns)
        index = offset + feature.placement.length
    parts.append(_text(position, length - index))
    position += length - index
    return torch.cat(parts, dim=1), position - length


def merged_grid(grid_thw: Sequence[int], merge_size: int) -> tuple[int, int, int]:
    """(frames, rows, columns) of embeddings that a patch grid gives."""
    frames, rows, columns = grid_thw
    return frames, rows // merge_size, columns // merge_size


def _text(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count).expand(3, -1)
