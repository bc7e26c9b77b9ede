"""The encoder side of towers that take items of one size only: one tensor in, as many rows out for each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from triptych.models.base import EncoderSide, PreparedItem
from triptych.models.encoder_graph import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    SupportsEncoderCudaGraph,
)


class FixedSizeEncoder(EncoderSide, SupportsEncoderCudaGraph):
    """A tower with a batch dimension, such as CLIP, ViT or Whisper's encoder.

    No item's rows depend on another's, so that a graph's budget is a number of items, and padding is items
    whose rows nobody reads.
    """

    #: The name of the tower's input in `PreparedItem.tensors` and among the buffers of a graph.
    input_name: ClassVar[str]

    @property
    @abstractmethod
    def rows_per_item(self) -> int:
        """Output rows of every item."""

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one item's input."""

    @abstractmethod
    def compute(self, inputs: torch.Tensor) -> torch.Tensor:
        """[items, rows_per_item, width] of inputs [items, *input_shape], on the device and in its dtype."""

    @torch.no_grad()
    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        rows = self.compute(self._inputs(items).to(self.device, self.dtype))
        return [item.clone() for item in rows]

    def _inputs(self, items: Sequence[PreparedItem]) -> torch.Tensor:
        """[items, *input_shape], a new tensor."""
        return torch.stack([item.tensors[self.input_name].view(self.input_shape) for item in items])

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=(self.modality,),
            buffer_keys=(self.input_name,),
            out_hidden_size=self.width,
            min_token_budget=self.rows_per_item,
            token_multiple=self.rows_per_item,
        )

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> EncoderCudaGraphCaptureInputs:
        shape = (token_budget // self.rows_per_item, *self.input_shape)
        return EncoderCudaGraphCaptureInputs(
            {self.input_name: torch.zeros(shape, device=device, dtype=dtype)}
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: Sequence[PreparedItem], max_batch_size: int, max_frames_per_batch: int
    ) -> EncoderCudaGraphReplayBuffers:
        return EncoderCudaGraphReplayBuffers({self.input_name: self._inputs(items)})

    @torch.no_grad()
    def encoder_cudagraph_forward(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.compute(values[self.input_name]).flatten(0, 1)
