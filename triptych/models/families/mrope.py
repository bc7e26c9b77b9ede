"""Multimodal rotary positions: text counts in one dimension, an image spans three."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.types import MMFeature


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
