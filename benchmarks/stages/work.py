"""Bytes and operations that a stage cannot do without, by the tensors of the checkpoint."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triptych.errors import ConfigError
from triptych.models.base import DecoderGeometry

#: Tensors of the tower, in the checkpoints that this benchmark is for.
_TOWER = "visual"


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers in linear layers: of the decoder, of its head, of the tower's layers and of its merger."""

    decoder: int
    head: int
    tower: int
    merger: int
    tower_layers: int
    tower_width: int

    @classmethod
    def of(cls, model: Path) -> Weights:
        """ConfigError for a folder without a tower."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(model.glob("*.safetensors")):
            shapes |= tensor_shapes(path)
        matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) > 1}
        tower = {name: count for name, count in matrices.items() if _TOWER in name}
        blocks = {name for name in tower if ".blocks." in name}
        if not blocks:
            raise ConfigError(
                f"{model} has no tower of the family that is measured: give a Qwen-VL checkpoint"
            )
        merger = sum(count for name, count in tower.items() if "merger" in name)
        text = {name: n for name, n in matrices.items() if name not in tower and "embed_tokens" not in name}
        return cls(
            decoder=sum(text.values()) - text.get("lm_head.weight", 0),
            head=text.get("lm_head.weight", 0),
            tower=sum(n for name, n in tower.items() if "merger" not in name and "pos_embed" not in name),
            merger=merger,
            tower_layers=len({name.split(".blocks.")[1].split(".")[0] for name in blocks}),
            tower_width=next(shapes[name][1] for name in sorted(blocks) if "qkv" in name),
        )

    def tower_operations(self, patches: int, merged: int) -> float:
        """Of one picture of so many patches, `merged` of them to one row."""
        pairs = 4.0 * patches * patches * self.tower_width * self.tower_layers
        return 2.0 * (self.tower * patches + self.merger * patches / merged) + pairs

    def prefill_operations(self, geometry: DecoderGeometry, tokens: int, context: int) -> float:
        """Of `tokens` tokens that see `context` earlier ones and, each, those before itself."""
        seen = tokens * context + tokens * (tokens + 1) / 2
        pairs = 4.0 * seen * geometry.num_heads * geometry.head_dim * geometry.num_layers
        return 2.0 * (self.decoder * tokens + self.head) + pairs

    def step_bytes(self, geometry: DecoderGeometry, sequences: int, context: int, width: int) -> float:
        """Read by a decode step: all weights, and every sequence's keys and values; `width` of a number."""
        cached = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
        return float(width * (self.decoder + self.head + sequences * context * cached))


def tensor_shapes(path: Path) -> Mapping[str, tuple[int, ...]]:
    """By tensor, from the file's header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
