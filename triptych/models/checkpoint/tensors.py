"""The tensors of a checkpoint folder, read in parts; those in 8 bits with scales become floats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open

from triptych.base.errors import ConfigError
from triptych.models.checkpoint.folder import open_tensors, read_config, tensor_files
from triptych.models.checkpoint.quantized import read_scaled
from triptych.models.checkpoint.scaled_weights import ScaledWeight


@dataclass(frozen=True, slots=True)
class Cut:
    """Indices `first` to `last` of dimension `dim`, which has `whole` in the file."""

    dim: int
    first: int
    last: int
    whole: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this part of the whole tensor."""
        return tensor.narrow(self.dim, self.first, self.last - self.first)

    def fits(self, shape: list[int]) -> bool:
        """Whether a tensor of this shape is the one that the cut was made for."""
        return self.dim < len(shape) and shape[self.dim] == self.whole


#: Of an element, by safetensors' names of dtypes; the others have one byte.
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4}
_ITEM_BYTES |= {"BF16": 2, "F16": 2, "I16": 2, "U16": 2}

#: Read pages count as this process's memory while they are mapped. A file is mapped anew after so many, or
#: the weights would be in memory twice at the end of loading: as pages of the file and as their copies.
MAPPED_BYTES = 64 << 20
#: Elements that become floats at a time: they are still in the cache when they are multiplied.
_PART = 1 << 18


class Checkpoint:
    """An open checkpoint: `config` is config.json, `files` maps every tensor's key to the file with it.

    `scaled` are the weights in 8 bits, by key: they are read as floats, and their scales are no tensors here.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config = read_config(self.path)
        self._all = tensor_files(self.path)
        found = read_scaled(self.path)
        self.scaled: dict[str, ScaledWeight] = found.weights
        self.files = {key: file for key, file in self._all.items() if key not in found.beside}
        self.files |= {key: self._all[one.packed] for key, one in self.scaled.items() if one.packed}

    def read(
        self,
        keys: Iterable[str],
        cuts: Mapping[str, Cut] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of `keys`, file by file, as mapped memory: copy what shall outlive the files.

        Weights in 8 bits come as floats in `dtype`, in memory of their own. Of a key in `cuts` only that part
        is read; ConfigError for a tensor that it was not made for.
        """
        others: dict[Path, safe_open] = {}
        for file, names in self._by_file(keys).items():
            tensors, read = open_tensors(file), 0
            for name in names:
                if read >= MAPPED_BYTES:
                    tensors, read = open_tensors(file), 0
                cut = (cuts or {}).get(name)
                weight = self.scaled.get(name)
                packed = weight is not None and bool(weight.packed)
                tensor = self._packed(tensors, name, cut) if packed else self._tensor(tensors, name, cut)
                read += tensor.nbytes
                if weight is not None:
                    scale = self._scale(weight, file, tensors, others)
                    dim, first = (0, 0) if cut is None else (cut.dim, cut.first)
                    tensor = dequantized(weight, tensor, scale, dtype, dim=dim, first=first)
                yield name, tensor

    def nbytes(
        self,
        keys: Iterable[str],
        cuts: Mapping[str, Cut] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        """Bytes of what `read` of the same gives, by the files' headers."""
        total = 0
        for file, names in self._by_file(keys).items():
            with open_tensors(file) as tensors:
                for name in names:
                    if name in self.scaled:
                        size = self.scaled[name].stored.elements * dtype.itemsize
                    else:
                        whole = tensors.get_slice(name)
                        size = math.prod(whole.get_shape()) * _ITEM_BYTES.get(whole.get_dtype(), 1)
                    cut = (cuts or {}).get(name)
                    total += size if cut is None else size * (cut.last - cut.first) // cut.whole
        return total

    def lazy(self, dtype: torch.dtype) -> dict[str, LazyTensor]:
        """Every tensor by key, read when it is indexed, as transformers takes them for a state dict."""
        opened = {file: open_tensors(file) for file in set(self._all.values())}
        return {
            key: LazyTensor(opened[file], key, self.scaled.get(key), dtype, self._scale_file(key, opened))
            for key, file in self.files.items()
        }

    def _scale_file(self, key: str, opened: Mapping[Path, safe_open]) -> safe_open | None:
        weight = self.scaled.get(key)
        return None if weight is None else opened[self._all[weight.scale]]

    def _scale(
        self, weight: ScaledWeight, file: Path, tensors: safe_open, others: dict[Path, safe_open]
    ) -> torch.Tensor:
        """Its scales, by `tensors` of its own file, else by one that was opened for scales before."""
        holder = self._all[weight.scale]
        if holder != file:
            tensors = others[holder] if holder in others else others.setdefault(holder, open_tensors(holder))
        return cast("torch.Tensor", tensors.get_tensor(weight.scale))  # type: ignore[no-untyped-call]

    def _by_file(self, keys: Iterable[str]) -> dict[Path, list[str]]:
        tensors_by_file: dict[Path, list[str]] = {}
        for key in keys:
            tensors_by_file.setdefault(self.files[key], []).append(key)
        return tensors_by_file

    def _packed(self, tensors: safe_open, name: str, cut: Cut | None) -> torch.Tensor:
        """A weight's whole numbers, or their part, of the tensor that has four in 32 bits."""
        key = self.scaled[name].packed
        if cut is None or cut.dim == 0:
            return _unpacked(self._tensor(tensors, key, cut))
        # A part may begin inside of 32 bits.
        numbers = _unpacked(self._tensor(tensors, key, None))
        if not cut.fits(list(numbers.shape)):
            raise self._misfit(name, list(numbers.shape), cut)
        return cut.of(numbers)

    def _misfit(self, name: str, shape: list[int], cut: Cut) -> ConfigError:
        return ConfigError(
            f"MODEL={self.path}: its tensors do not fit its config.json: {name} is {shape}, where "
            f"dimension {cut.dim} should be {cut.whole}: fetch the checkpoint again"
        )

    def _tensor(self, tensors: safe_open, name: str, cut: Cut | None) -> torch.Tensor:
        if cut is None:
            return cast("torch.Tensor", tensors.get_tensor(name))  # type: ignore[no-untyped-call]
        whole = tensors.get_slice(name)  # type: ignore[no-untyped-call]
        shape = whole.get_shape()
        if not cut.fits(shape):
            raise self._misfit(name, shape, cut)
        span = slice(cut.first, cut.last)
        part: torch.Tensor = whole[span] if cut.dim == 0 else whole[:, span]
        return part


class LazyTensor:
    """A tensor of an open file that is read, and becomes floats where it has scales, when it is indexed."""

    def __init__(
        self,
        tensors: safe_open,
        key: str,
        weight: ScaledWeight | None,
        dtype: torch.dtype,
        scales: safe_open | None,
    ) -> None:
        self._tensors, self._weight = tensors, weight
        self._key = key if weight is None else weight.packed or key
        self._floats, self._scales = dtype, scales

    @cached_property
    def _slice(self) -> object:
        return self._tensors.get_slice(self._key)  # type: ignore[no-untyped-call]

    def get_shape(self) -> list[int]:
        shape: list[int] = self._slice.get_shape()  # type: ignore[attr-defined]
        return shape

    def get_dtype(self) -> str:
        return str(self._slice.get_dtype())  # type: ignore[attr-defined]

    def __getitem__(self, index: object) -> torch.Tensor:
        if self._weight is None or self._scales is None:
            return cast("torch.Tensor", self._slice[index])  # type: ignore[index]
        part = cast("torch.Tensor", self._tensors.get_tensor(self._key))  # type: ignore[no-untyped-call]
        part = _unpacked(part) if self._weight.packed else part
        scale = self._scales.get_tensor(self._weight.scale)  # type: ignore[no-untyped-call]
        return dequantized(self._weight, part, scale, self._floats)[index]  # type: ignore[index]


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """int8 [..., 4 columns] of int32 [..., columns]: the lowest byte first, each number plus 128."""
    return packed.contiguous().view(torch.uint8).bitwise_xor(128).view(torch.int8)


def dequantized(
    weight: ScaledWeight,
    part: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    dim: int = 0,
    first: int = 0,
) -> torch.Tensor:
    """`part` of a weight as floats in `dtype`; it begins at `first` of dimension `dim` of the whole.

    The products are rounded once, from float32.
    """
    scales = scale.float().reshape(-1, *weight.grid)
    rows, columns = part.shape[-2:]
    starts = [0] * part.dim()
    starts[dim] = first
    of_row = (torch.arange(rows) + starts[-2]) // weight.block[0]
    of_column = (torch.arange(columns) + starts[-1]) // weight.block[1]
    wide = weight.block[1]
    first_block, in_blocks = starts[-1] // wide, not (starts[-1] % wide or columns % wide)
    matrices = part.reshape(-1, rows, columns)
    if part.dim() > 2 and len(scales) > 1:
        scales = scales[starts[0] : starts[0] + len(matrices)]
    out = torch.empty(matrices.shape, dtype=dtype)
    step = max(1, _PART // max(1, columns))
    for number, matrix in enumerate(matrices):
        own = scales[min(number, len(scales) - 1)]
        for begin in range(0, rows, step):
            some = slice(begin, begin + step)
            values, factor = matrix[some].float(), own[of_row[some]]
            if in_blocks:
                values.view(len(values), -1, wide).mul_(
                    factor[:, first_block : first_block + columns // wide, None]
                )
            else:
                values.mul_(factor[:, of_column])
            out[number, some] = values
    return out.view(part.shape)
