"""A toy encoder with two towers on two independent tensors: a picture whole, and the pieces it is cut into.

A picture that is no larger than one piece has none, so that its second tensor is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from triptych.models.base import EncoderSide, PreparedItem
from triptych.models.encoder_graph import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    SupportsEncoderCudaGraph,
)

SIDE = 16
WIDTH = 24
#: Rows of the whole picture, and of each piece.
ROWS = 4
_KEYS = ("pixel_values", "piece_values", "picture_rows", "piece_rows")


class _Tower(nn.Module):
    """[n, 3, SIDE, SIDE] to [n, ROWS, WIDTH], each of the n by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, SIDE // 2, stride=SIDE // 2)
        self.positions = nn.Parameter(torch.empty(ROWS, WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        attended: torch.Tensor = self.out(functional.scaled_dot_product_attention(query, key, value))
        rows: torch.Tensor = hidden + attended
        return rows


class TwoTowerEncoder(EncoderSide, SupportsEncoderCudaGraph):
    """An item's rows are those of its pieces, then those of the whole picture."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.width, self.dtype, self.device = WIDTH, dtype, torch.device(device)
        self._picture, self._piece = _Tower(), _Tower()
        towers = nn.ModuleList([self._picture, self._piece]).requires_grad_(False)
        generator = torch.Generator().manual_seed(7)
        for parameter in towers.parameters():
            parameter.normal_(0, 0.3, generator=generator)
        self.module = towers.to(self.device, dtype)

    @classmethod
    def load(cls, path: Path, **options: Any) -> Self:
        return cls()

    def preprocess(self, media: Image.Image, options: Any) -> PreparedItem:
        columns, rows = media.width // SIDE, media.height // SIDE
        corners = [(x * SIDE, y * SIDE) for y in range(rows) for x in range(columns)]
        cut = corners if len(corners) > 1 else []
        pieces = [_pixels(media.crop((x, y, x + SIDE, y + SIDE))) for x, y in cut]
        count = (1 + len(pieces)) * ROWS
        tensors = {
            "pixel_values": _pixels(media.resize((SIDE, SIDE))),
            "piece_values": torch.stack(pieces) if pieces else torch.empty(0, 3, SIDE, SIDE),
        }
        return PreparedItem(rows=count, length=count, grid_thw=(), cost=count, tensors=tensors)

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        outputs = []
        for item in items:
            pieces = self._piece(item.tensors["piece_values"].to(self.device, self.dtype))
            whole = self._picture(item.tensors["pixel_values"][None].to(self.device, self.dtype))
            outputs.append(torch.cat([pieces.flatten(0, 1), whole[0]]))
        return outputs

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=("image",), buffer_keys=_KEYS, out_hidden_size=WIDTH, min_token_budget=ROWS
        )

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> EncoderCudaGraphCaptureInputs:
        maximum = max(1, token_budget // ROWS)
        shapes = ((maximum, 3, SIDE, SIDE), (maximum, 3, SIDE, SIDE), (token_budget,), (token_budget,))
        kinds = (dtype, dtype, torch.int64, torch.int64)
        return EncoderCudaGraphCaptureInputs(
            {
                key: torch.zeros(shape, device=device, dtype=kind)
                for key, shape, kind in zip(_KEYS, shapes, kinds, strict=True)
            }
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, items: Sequence[PreparedItem], max_batch_size: int, max_frames_per_batch: int
    ) -> EncoderCudaGraphReplayBuffers:
        """`picture_rows` and `piece_rows` say where an output row comes from: 0 for nowhere, then from 1."""
        picture_rows, piece_rows = [], []
        pictures = pieces = 0
        for item in items:
            count = item.rows - ROWS
            piece_rows += [*range(pieces + 1, pieces + count + 1), *([0] * ROWS)]
            picture_rows += [*([0] * count), *range(pictures + 1, pictures + ROWS + 1)]
            pieces, pictures = pieces + count, pictures + ROWS
        values = (
            torch.stack([item.tensors["pixel_values"] for item in items]),
            torch.cat([item.tensors["piece_values"] for item in items]),
            torch.tensor(picture_rows),
            torch.tensor(piece_rows),
        )
        return EncoderCudaGraphReplayBuffers(dict(zip(_KEYS, values, strict=True)))

    def encoder_cudagraph_forward(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        pixels, pieces, picture_rows, piece_rows = (values.pop(key) for key in _KEYS)
        whole = _gathered(self._picture(pixels), picture_rows)
        return whole + _gathered(self._piece(pieces), piece_rows)


def _gathered(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Row 0 of the index is zeros."""
    flat = rows.flatten(0, 1)
    return torch.cat([flat.new_zeros(1, flat.shape[1]), flat])[index]


def _pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image, np.float32).transpose(2, 0, 1).copy() / 127.5 - 1)
