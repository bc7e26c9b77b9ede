"""Weights that a file holds in 8 bits with scales beside them, and how they become floats again.

The formats are those of transformers' and DeepSeek's FP8 (`weight_scale_inv` per block), of vLLM's and
ModelOpt's (`weight_scale` per tensor or row) and of compressed-tensors' `float-quantized`, `int-quantized`,
`naive-quantized` and `pack-quantized` of 8 bits (per tensor, row, group or block, symmetric): a weight is its
numbers times their scales in all of them. Scales of activations and of KV caches are not read: what is
computed here is not rounded.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from triptych.base.types import Options

#: safetensors' names of the dtypes that are read, as people call them.
READ = {"F8_E4M3": "FP8", "F8_E5M2": "FP8", "I8": "int8"}
_SCALE_DTYPES = frozenset({"F32", "F16", "BF16"})
_SCALES = ("_scale_inv", "_scale")
#: Of activations, and of keys and values in a cache of 8 bits.
_ACTIVATIONS = re.compile(r"(^|[._])(input|output|activation|[qkv])_(scale|zero_point)(_inv|_ub)?$")
#: The end of the key of a weight whose numbers are packed.
_PACKED = ".weight_packed"
#: What says that a weight is more than numbers times scales.
_MORE = ("_zero_point", "_g_idx", "_global_scale", "_scale_2")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by its file's header: safetensors' name of the dtype, and the shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight [..., rows, columns] in 8 bits, and the tensor of its scales.

    `block` is (rows, columns) of one scale, the last ones of which may be short; `grid` (rows, columns) of
    scales of one matrix. `packed` is the key of the tensor that holds four numbers in 32 bits, each plus 128,
    where the file has the weight so.
    """

    stored: StoredTensor
    scale: str
    grid: tuple[int, int]
    block: tuple[int, int]
    packed: str = ""

    def __str__(self) -> str:
        rows, columns = self.stored.shape[-2:]
        named = {(1, 1): "a tensor", (rows, 1): "a row", (1, columns): "a column"}
        per = named.get(self.grid, f"{self.block[0]}x{self.block[1]}")
        return f"{READ[self.stored.dtype]}, a scale per {per.removeprefix('a ')}"


@dataclass(frozen=True, slots=True)
class ScaledWeights:
    """Those of a checkpoint by key; `beside` are the keys of scales and of what is not read at all, and
    `unread` why a quantized tensor is none of them, by its key."""

    weights: dict[str, ScaledWeight] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()
    unread: dict[str, str] = field(default_factory=dict)


def described(weights: Iterable[ScaledWeight]) -> str:
    """How many are in which format, for people."""
    kinds = Counter(map(str, weights))
    return "; ".join(f"{count} weights in {kind}" for kind, count in kinds.most_common(3))


def find_scaled(
    stored: Mapping[str, StoredTensor], quantized: Iterable[str], quantization: Options
) -> ScaledWeights:
    """By dtypes, shapes and names; `quantized` are the keys of quantized weights and of what is beside."""
    blocks, quantized = list(_blocks(quantization)), list(quantized)
    weights: dict[str, ScaledWeight] = {}
    unread: dict[str, str] = {}
    for key in quantized:
        tensor, name, packed = stored[key], key, ""
        if key.endswith(_PACKED) and tensor.dtype == "I32" and _packs_bytes(quantization):
            name, packed = key.removesuffix("_packed"), key
            tensor = StoredTensor("I8", (*tensor.shape[:-1], 4 * tensor.shape[-1]))
        if tensor.dtype not in READ:
            continue
        found = _scaled(name, tensor, stored, blocks)
        if isinstance(found, ScaledWeight):
            weights[name] = replace(found, packed=packed)
        else:
            unread[key] = found
    beside = {weight.scale for weight in weights.values()}
    # The whole shape, which the packed one and the scales tell, too.
    beside |= {each for name, w in weights.items() if w.packed for each in (w.packed, f"{name}_shape")}
    beside |= {key for key in stored if weights and _ACTIVATIONS.search(key)}
    for key in quantized:
        if key not in weights and key not in beside and key not in unread:
            unread[key] = f"is stored as {stored[key].dtype}"
    return ScaledWeights(weights, frozenset(beside), unread)


def _packs_bytes(quantization: Options) -> bool:
    """Whether all packed numbers of compressed-tensors are whole ones of 8 bits."""
    groups = quantization.get("config_groups")
    given = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    return bool(given) and all(one and (one.get("num_bits"), one.get("type")) == (8, "int") for one in given)


def _scaled(
    key: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor], blocks: list[tuple[int, int]]
) -> ScaledWeight | str:
    """The weight, or why it is none."""
    kind = READ[tensor.dtype]
    name = next((key + end for end in _SCALES if key + end in stored), "")
    if not name:
        return f"is {kind} without {key.rpartition('.')[2]}_scale or _scale_inv beside it"
    if more := next((key + end for end in _MORE if key + end in stored), ""):
        return f"is {kind} with {more.rpartition('.')[2]} beside it"
    scale = stored[name]
    if scale.dtype not in _SCALE_DTYPES:
        return f"is {kind} with scales that are stored as {scale.dtype}"
    if len(tensor.shape) < 2 or not tensor.elements:
        return f"is {kind} and no matrix"
    grid = _grid(tensor.shape, scale.shape)
    block = _block(tensor.shape, grid, blocks) if grid is not None else None
    if grid is None or block is None:
        return f"is {kind} {list(tensor.shape)} with scales {list(scale.shape)}, which do not divide it"
    return ScaledWeight(tensor, name, grid, block)


def _grid(weight: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, int] | None:
    """Rows and columns of scales of one matrix; None where their shape is no grid over it."""
    before, (rows, columns) = weight[:-2], weight[-2:]
    if math.prod(scale) == 1:
        return 1, 1
    if before and scale == before:
        return 1, 1
    if len(scale) == len(weight) and scale[:-2] == before:
        return scale[-2], scale[-1]
    # A scale a row, without a dimension for its columns.
    if scale == (*before, rows) and not (before and rows == columns):
        return rows, 1
    return None


def _block(
    weight: tuple[int, ...], grid: tuple[int, int], blocks: list[tuple[int, int]]
) -> tuple[int, int] | None:
    """Rows and columns of one scale: as the config says where that fits, else as it divides the weight."""
    sides = weight[-2:]
    for block in blocks:
        if all(-(-side // size) == count for side, size, count in zip(sides, block, grid, strict=True)):
            return block
    if any(not count or side % count for side, count in zip(sides, grid, strict=True)):
        return None
    return sides[0] // grid[0], sides[1] // grid[1]


def _blocks(quantization: Options) -> Iterator[tuple[int, int]]:
    """The blocks and groups that a config's quantization names."""
    groups = quantization.get("config_groups")
    parts = [quantization, *(groups.values() if isinstance(groups, dict) else ())]
    for part in parts:
        if not isinstance(part, dict):
            continue
        weights = part.get("weights")
        named = weights if isinstance(weights, dict) else {}
        for block in (part.get("weight_block_size"), named.get("block_structure")):
            if isinstance(block, list) and len(block) == 2 and all(_is_size(size) for size in block):
                yield block[0], block[1]
        size = named.get("group_size")
        if isinstance(size, int) and _is_size(size):
            yield 1, size


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
