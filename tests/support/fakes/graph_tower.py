"""A tower of a few lines on buffers of fixed shape, whose rows depend on all rows of their item."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.models.base import PreparedItem
from triptych.models.encoder_graph import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    SupportsEncoderCudaGraph,
    pad_repeat_last,
    padded_buffers,
)

WIDTH = 3


class GraphTowerFake(SupportsEncoderCudaGraph):
    """Adds the mean of an item's rows to each of them. `captured` and `eager` are the sizes of its calls.

    With `pops` its forward takes values out of the dict, as some towers do. Keys in `lost` are missing in the
    values of replays, those in `added` are too many.
    """

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, *, pops: bool = False) -> None:
        self.captured: list[int] = []
        self.eager: list[int] = []
        self.lost: set[str] = set()
        self.added: dict[str, torch.Tensor] = {}
        self.replaced: dict[str, torch.Tensor] = {}
        self._pops = pops

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        padding = {"cu_seqlens": pad_repeat_last}
        return EncoderCudaGraphConfig(("image",), ("pixel_values", "cu_seqlens"), WIDTH, padding)

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> EncoderCudaGraphCaptureInputs:
        self.captured.append(token_budget)
        shapes = {
            "pixel_values": ((token_budget, WIDTH), dtype),
            "cu_seqlens": ((max_batch_size + 1,), torch.int32),
        }
        return padded_buffers(self.get_encoder_cudagraph_config(), shapes, device)

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: Sequence[PreparedItem], max_batch_size: int, max_frames_per_batch: int
    ) -> EncoderCudaGraphReplayBuffers:
        offsets = torch.tensor([0, *(item.rows for item in items)], dtype=torch.int32).cumsum(0)
        values = {
            "pixel_values": torch.cat([item.tensors["pixel_values"] for item in items]),
            "cu_seqlens": offsets.int(),
        }
        values |= self.added | self.replaced
        return EncoderCudaGraphReplayBuffers(
            {key: value for key, value in values.items() if key not in self.lost}
        )

    def encoder_cudagraph_forward(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        take = values.pop if self._pops else values.__getitem__
        pixels, offsets = take("pixel_values"), take("cu_seqlens")
        ids = torch.searchsorted(offsets[1:].contiguous(), torch.arange(len(pixels)).int(), right=True)
        same = (ids[:, None] == ids[None, :]).to(pixels.dtype)
        # NaN times zero is NaN: whatever a buffer holds beyond its batch shows.
        return pixels + same @ pixels / same.sum(1, keepdim=True)

    def encoder_cudagraph_item_frames(self, item: PreparedItem) -> int:
        return item.grid_thw[0] if item.grid_thw else 1

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """As the tower does it without buffers."""
        self.eager.append(len(items))
        pixels = [item.tensors["pixel_values"] for item in items]
        return [each + each.mean(0, keepdim=True) for each in pixels]


def graph_item(rows: int, seed: int = 0, frames: int = 1) -> PreparedItem:
    """An item of so many rows with random pixels."""
    pixels = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed * 1000 + rows))
    return PreparedItem(rows, rows, (frames, rows, 1), rows, {"pixel_values": pixels})
