"""Encoder graphs of text encoders: the tokens of all texts in one row, each text attending to itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from triptych.models.base import PreparedItem
from triptych.models.encoder_graph import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    SupportsEncoderCudaGraph,
)

_KEYS = ("input_ids", "positions", "segment_ids")
_MIN_BUDGET = 64


def pad_own_segment(buffer: torch.Tensor, used: int) -> None:
    """-1, which is no text's number: padding attends to padding only."""
    buffer[used:] = -1


class PackedTexts(SupportsEncoderCudaGraph):
    """Encoder graphs of a text encoder, which says how its layers are walked.

    The buffers are `input_ids`, `positions` (each text's own, from 0) and `segment_ids` (which text a token
    is of), all int64 [token_budget]. The mask over them is [token_budget, token_budget]: attention costs what
    one text of the budget's length would, however short the texts are, so that no budget is larger than the
    longest text unless `--encoder-graph-budgets` asks for more.
    """

    modality: ClassVar[str]
    width: int
    #: Tokens of the longest text.
    max_tokens: int

    @abstractmethod
    def walk(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Rows [1, T, width] of token_ids and positions [1, T]; mask [1, 1, T, T] is true where one token
        attends to another, and true for each and itself."""

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=(self.modality,),
            buffer_keys=_KEYS,
            out_hidden_size=self.width,
            padding_logics={"segment_ids": pad_own_segment},
            max_token_budget=max(_MIN_BUDGET, self.max_tokens),
            min_token_budget=_MIN_BUDGET,
        )

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> EncoderCudaGraphCaptureInputs:
        return EncoderCudaGraphCaptureInputs(
            {key: torch.zeros(token_budget, device=device, dtype=torch.int64) for key in _KEYS}
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: Sequence[PreparedItem], max_batch_size: int, max_frames_per_batch: int
    ) -> EncoderCudaGraphReplayBuffers:
        lengths = torch.tensor([item.rows for item in items])
        values = (
            torch.cat([item.tensors["input_ids"] for item in items]),
            torch.cat([torch.arange(item.rows) for item in items]),
            torch.arange(len(items)).repeat_interleave(lengths),
        )
        return EncoderCudaGraphReplayBuffers(dict(zip(_KEYS, values, strict=True)))

    @torch.no_grad()
    def encoder_cudagraph_forward(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        token_ids, positions, segments = (values[key] for key in _KEYS)
        mask = segments[:, None] == segments[None, :]
        return self.walk(token_ids[None], positions[None], mask[None, None])[0]
