"""Qwen2.5-VL: a tower with window attention, which undoes its own reordering."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from transformers.vision_utils import get_vision_window_index

from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.encoder_graph import PaddingLogic, pad_identity
from triptych.models.families.qwen import QwenEncoder
from triptych.models.families.qwen_graph import BufferShape
from triptych.models.generic.decoder import GenericDecoder
from triptych.models.weights.loading import KeyMap

#: The hub writes `visual.`, transformers `model.visual.` when asked for its own names.
KEYS = KeyMap(encoder=((r"^(model\.)?visual\.", "model.visual."),))


class Qwen2_5VLEncoder(QwenEncoder):
    keys: ClassVar[KeyMap] = KEYS

    @property
    def window_side(self) -> int:
        """Output rows along each side of a whole window."""
        config = self.vision_config
        return int(config.window_size // config.patch_size // self.merge_size)

    @property
    def window_patches(self) -> int:
        """Patches of a whole window."""
        return (self.window_side * self.merge_size) ** 2

    def graph_shapes(self, rows: int, frames: int) -> Mapping[str, BufferShape]:
        # Most windows for their rows have pictures of one row: a window for each `window_side` rows, and the
        # rest. Rows of padding have another rest.
        windows = rows // self.window_side + frames + 2
        return {"window_index": ((rows,), torch.int64), "cu_window_seqlens": ((windows + 1,), torch.int32)}

    def graph_values(self, grids: torch.Tensor) -> dict[str, torch.Tensor]:
        config = self.vision_config
        index, offsets = get_vision_window_index(
            grids, self.merge_size, config.window_size, config.patch_size
        )
        return {"window_index": index, "cu_window_seqlens": offsets}

    def graph_padding(self) -> dict[str, PaddingLogic]:
        return {"window_index": pad_identity, "cu_window_seqlens": partial(pad_windows, self.window_patches)}

    def graph_segments(self, patches: int) -> dict[str, int]:
        return {"cu_seqlens": patches, "cu_window_seqlens": self.window_patches}


def pad_windows(patches: int, buffer: torch.Tensor, used: int) -> None:
    """Whole windows of so many patches after the last offset, so that padding has windows like any rows."""
    start = buffer[used - 1] if used else torch.zeros((), dtype=buffer.dtype, device=buffer.device)
    steps = torch.arange(buffer.shape[0] - used, device=buffer.device, dtype=buffer.dtype)
    buffer[used:] = start + patches * (steps + (used > 0))


ENCODER: type[EncoderSide] = Qwen2_5VLEncoder
DECODER: type[DecoderSide] = GenericDecoder
