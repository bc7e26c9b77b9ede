"""Qwen towers on buffers of fixed shape: what depends on the patch grids is computed before the call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

from triptych.models.base import PreparedItem
from triptych.models.encoder_graph import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    PaddingLogic,
    SupportsEncoderCudaGraph,
    pad_repeat_last,
    padded_buffers,
)
from triptych.models.families.segments import Segments, has_varlen

#: Shape and dtype of a buffer.
BufferShape = tuple[Sequence[int], torch.dtype]


class QwenGraph(SupportsEncoderCudaGraph):
    """The part of a Qwen encoder that runs its tower on buffers of fixed shape.

    Buffers count patches, `merge_size` squared for each output row. The tower is transformers' own: it takes
    positions and segments in place of what it would compute from the grids.
    """

    tower: Any
    vision_config: PreTrainedConfig
    merge_size: int
    width: int
    dtype: torch.dtype

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        padding = {"cu_seqlens": pad_repeat_last} | self.graph_padding()
        keys = self._shapes(1, 1, self.dtype)
        return EncoderCudaGraphConfig(("image", "video"), tuple(keys), self.width, padding)

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> EncoderCudaGraphCaptureInputs:
        shapes = self._shapes(token_budget, max_frames_per_batch, dtype)
        return padded_buffers(self.get_encoder_cudagraph_config(), shapes, device)

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: Sequence[PreparedItem], max_batch_size: int, max_frames_per_batch: int
    ) -> EncoderCudaGraphReplayBuffers:
        grids = torch.tensor([item.grid_thw for item in items])
        return EncoderCudaGraphReplayBuffers(
            {
                "pixel_values": self.pixels(items),
                "position_ids": get_vision_position_ids(grids, self.merge_size),
                "cu_seqlens": get_vision_cu_seqlens(grids),
            }
            | self.graph_values(grids)
        )

    def encoder_cudagraph_forward(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        pixels = values["pixel_values"]
        given: dict[str, object] = {key: value for key, value in values.items() if key != "pixel_values"}
        varlen = has_varlen(pixels.device, pixels.dtype)
        for key, longest in self.graph_segments(len(pixels)).items():
            given[key] = Segments.of(values[key], len(pixels), longest, varlen=varlen)
        return torch.cat(self.columns(self.tower(pixels, grid_thw=None, **given)), dim=-1)

    def encoder_cudagraph_item_frames(self, item: PreparedItem) -> int:
        return item.grid_thw[0]

    @abstractmethod
    def pixels(self, items: Sequence[PreparedItem]) -> torch.Tensor:
        """[patches of all items, elements of a patch] on the tower's device and in its dtype."""

    @abstractmethod
    def columns(self, out: Any) -> list[torch.Tensor]:
        """The column blocks of all rows, [rows, hidden_size] each, of the tower's output."""

    def graph_shapes(self, rows: int, frames: int) -> Mapping[str, BufferShape]:
        """The family's further buffers, for so many output rows and frames."""
        return {}

    def graph_values(self, grids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Their values for a batch of grids [items, 3]."""
        return {}

    def graph_padding(self) -> dict[str, PaddingLogic]:
        """How they are padded, where not by zeros."""
        return {}

    def graph_segments(self, patches: int) -> dict[str, int]:
        """The keys of offsets of segments, and the longest segment in a call of so many patches."""
        return {"cu_seqlens": patches}

    def _shapes(self, rows: int, frames: int, dtype: torch.dtype) -> dict[str, BufferShape]:
        patches = rows * self.merge_size**2
        config = self.vision_config
        pixels = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return {
            "pixel_values": ((patches, pixels), dtype),
            "position_ids": ((patches, 2), torch.int64),
            "cu_seqlens": ((frames + 1,), torch.int32),
            **self.graph_shapes(rows, frames),
        }
