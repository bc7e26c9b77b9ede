"""Bytes and operations that a stage cannot do without, by the tensors of the checkpoint."""

from __future__ import annotations

import json
import math
import statistics
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

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


@dataclass(frozen=True, slots=True)
class Stage:
    """`seconds` as measured; `least` by what is limited: "reading", "copying" or "matrix product"."""

    name: str
    seconds: float
    least: float | None = None
    limited_by: str = ""

    @property
    def share(self) -> float | None:
        """Of the limit that is reached: 1 is all that the machine can do."""
        return None if self.least is None else self.least / self.seconds

    def row(self) -> list[str]:
        least = "–" if self.least is None else f"{self.least * 1e3:.3g}"
        share = "–" if self.share is None else f"{self.share:.0%}"
        return [self.name, f"{self.seconds * 1e3:.3g}", least, share, self.limited_by or "–"]


#: Larger than any cache, and split as the weights of a layer are.
_READ_BYTES = 512 << 20
_CHUNK_ELEMENTS = 4 << 20
#: Rows, inner and outer size of the product: 512 tokens through a layer of `small`.
_SHAPE = (512, 1024, 3072)


@dataclass(frozen=True, slots=True)
class Limits:
    """`read` and `copy` in bytes per second, `product` in multiply-adds times two per second."""

    read: float
    copy: float
    product: float


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    """Of `repeats` calls after one that does not count."""
    work()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def limits(dtype: torch.dtype, repeats: int = 9) -> Limits:
    """With torch's present number of threads. Reading is measured by the products of single rows."""
    bytes_each = torch.empty(0, dtype=dtype).element_size()
    wide = _CHUNK_ELEMENTS // 1024
    weights = [
        torch.ones(wide, 1024, dtype=dtype) for _ in range(_READ_BYTES // (_CHUNK_ELEMENTS * bytes_each))
    ]
    row = torch.ones(1024, dtype=dtype)
    source, target = torch.ones(_READ_BYTES // 8), torch.empty(_READ_BYTES // 8)
    rows, inner, outer = _SHAPE
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    with torch.inference_mode():
        # Two ways to read everything once: the faster one is the limit.
        by_product = median_seconds(lambda: [weight.mv(row) for weight in weights], repeats)
        plain = [weight.view(torch.int32 if bytes_each == 4 else torch.int16) for weight in weights]
        by_maximum = median_seconds(lambda: [weight.amax() for weight in plain], repeats)
        copied = median_seconds(lambda: target.copy_(source), repeats)
        product = median_seconds(lambda: torch.nn.functional.linear(left, right), 5 * repeats)
    size = len(weights) * _CHUNK_ELEMENTS * bytes_each
    return Limits(
        size / min(by_product, by_maximum), source.nbytes / copied, 2.0 * rows * inner * outer / product
    )
