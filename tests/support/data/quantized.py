"""Quantized copies of checkpoints, written by the formats' own libraries, and what these make of them again.

FP8 with `weight_scale_inv` by transformers' `Fp8Quantize` and `Fp8Dequantize`, AWQ and GPTQ by their
published layouts, the rest by the compressors of compressed-tensors. Imports nothing of Triptych.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

Tensors = dict[str, torch.Tensor]
#: The file's tensors for one weight, by key, and the floats that the library makes of them.
Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Format:
    """`config` is what config.json says; a weight that `write` leaves as it is is not quantized."""

    config: dict[str, Any]
    write: Writer


def fp8(block: tuple[int, int] | None, fmt: str = "e4m3") -> Format:
    """As transformers saves it; `block` None is one scale a tensor."""
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": fmt,
        "weight_block_size": list(block) if block else None,
        "modules_to_not_convert": ["lm_head", "model.visual"],
    }
    asked = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt="float"))

    def write(key: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = Fp8Quantize(asked).convert({key: weight})
        if len(found) == 1:
            return found, weight
        scale = next(value for name, value in found.items() if name != key)
        return found, Fp8Dequantize(asked)._dequantize_one(found[key], scale, torch.float32)

    return Format(config, write)


def compressed(form: str, *, rounds_inputs: bool = True, **weights: Any) -> Format:
    """As compressed-tensors writes it: `form` is its name of the format, `weights` its arguments.

    `rounds_inputs`: engines round what the weights are multiplied with, too, token by token.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    inputs = QuantizationArgs(num_bits=args.num_bits, type=args.type, strategy="token", dynamic=True)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=inputs if rounds_inputs else None
    )
    compressor = BaseCompressor.get_value_from_registry(form)

    def write(key: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if weight.dim() != 2:
            return {key: weight}, weight
        rows, columns = weight.shape
        across, down = {
            "tensor": (rows, columns),
            "channel": (1, columns),
            "group": (1, args.group_size or columns),
            "block": tuple(args.block_structure or (1, 1)),
        }[args.strategy]
        if rows % across or columns % down:
            return {key: weight}, weight
        tiles = weight.float().reshape(rows // across, across, columns // down, down)
        scale, zeros = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), args)
        scale = scale.reshape(1) if args.strategy == "tensor" else scale
        given = {"weight": weight.float(), "weight_scale": scale.float(), "weight_zero_point": zeros}
        if args.strategy == "tensor":
            given["weight_zero_point"] = zeros.reshape(1)
        stored = compressor.compress(given, scheme)
        floats = compressor.decompress(stored, scheme)["weight"]
        prefix = key.removesuffix("weight")
        return {prefix + name: value.contiguous() for name, value in stored.items()}, floats

    return Format(_named_as(form, scheme), write)


def _named_as(form: str, scheme: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*visual.*"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }


def fp4(form: str) -> Format:
    """As compressed-tensors writes FP4: NVIDIA's 16 weights have a scale in FP8, MX's 32 a power of two."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    nvidia = form.startswith("nv")
    size, strategy = (16, "tensor_group") if nvidia else (32, "group")
    args = QuantizationArgs(num_bits=4, type="float", strategy=strategy, group_size=size)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)

    def write(key: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        largest = weight.float().unflatten(1, (-1, size)).abs().amax(-1)
        given = {"weight": weight.float(), "weight_scale": torch.exp2((largest / 4).log2().floor())}
        if nvidia:
            whole = 448 * 6 / largest.max()
            scale = (largest / 6 * whole).to(torch.float8_e4m3fn)
            given |= {"weight_global_scale": whole.reshape(1), "weight_scale": scale.float()}
        stored = compressor.compress(given, scheme)
        floats = compressor.decompress(stored, scheme)["weight"].float()
        prefix = key.removesuffix("weight")
        return {prefix + name: value.contiguous() for name, value in stored.items()}, floats

    return Format(_named_as(form, scheme), write)


#: The outputs' order in 32 bits of AWQ, of eight neighbours.
_INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(group: int) -> Format:
    """As AutoAWQ writes it: 4 bits with zero points, eight outputs in 32 bits."""
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["visual", "lm_head"],
    }

    def write(key: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        tiles = weight.float().reshape(rows, columns // group, group)
        low, high = tiles.amin(-1).clamp(max=0), tiles.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).half()
        zeros = (-low / scale.float()).round().clamp(0, 15)
        numbers = (tiles / scale.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
        floats = (numbers - zeros[..., None]) * scale.float()[..., None]
        name = key.removesuffix("weight")
        return {
            f"{name}qweight": _packed(numbers.reshape(rows, columns).T, 1, _INTERLEAVED),
            f"{name}qzeros": _packed(zeros.T, 1, _INTERLEAVED),
            f"{name}scales": scale.T.contiguous(),
        }, floats.reshape(rows, columns)

    return Format(config, write)


def gptq(group: int) -> Format:
    """As AutoGPTQ writes it: 4 bits, symmetric, eight inputs in 32 bits, zero points less one."""
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    }

    def write(key: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        tiles = weight.float().reshape(rows, columns // group, group)
        scale = (tiles.abs().amax(-1) / 7).half()
        numbers = (tiles / scale.float()[..., None]).round().clamp(-8, 7)
        floats = numbers * scale.float()[..., None]
        name = key.removesuffix("weight")
        return {
            f"{name}qweight": _packed(numbers.reshape(rows, columns).T + 8, 0),
            f"{name}qzeros": _packed(torch.full((columns // group, rows), 7), 1),
            f"{name}scales": scale.T.contiguous(),
            f"{name}g_idx": torch.arange(columns, dtype=torch.int32) // group,
        }, floats.reshape(rows, columns)

    return Format(config, write)


def _packed(numbers: torch.Tensor, dim: int, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Eight neighbours of 4 bits along a dimension in one of 32, the first in the lowest bits."""
    parts = numbers.to(torch.int64).unflatten(dim, (-1, 8)).unbind(dim + 1)
    words = sum(parts[part] << 4 * place for place, part in enumerate(order))
    return torch.as_tensor(words).to(torch.int32).contiguous()


def write_quantized(
    source: Path, folder: Path, form: Format, chosen: Callable[[str], bool]
) -> tuple[Path, Path]:
    """A copy of `source` with the chosen matrices quantized, and one with the floats that they stand for.

    The first is written into as many files as the source has, a scale perhaps in another one than its weight.
    """
    quantized, plain = folder / "quantized", folder / "plain"
    shutil.copytree(source, quantized)
    shutil.copytree(source, plain)
    files = sorted(source.glob("*.safetensors"))
    held: list[Tensors] = [{} for _ in files]
    changed = 0
    for number, file in enumerate(files):
        floats = {}
        for key, value in load_file(file).items():
            if not (chosen(key) and value.dim() > 1 and value.is_floating_point() and "norm" not in key):
                held[number][key] = floats[key] = value
                continue
            stored, floats[key] = form.write(key, value)
            changed += len(stored) > 1
            for name, tensor in stored.items():
                held[number if name == key else (number + 1) % len(files)][name] = tensor
        save_file(floats, plain / file.name, metadata={"format": "pt"})
    assert changed, "nothing is quantized"
    for file, tensors in zip(files, held, strict=True):
        save_file(tensors, quantized / file.name, metadata={"format": "pt"})
    if len(files) > 1:
        index = {key: file.name for file, tensors in zip(files, held, strict=True) for key in tensors}
        name = "model.safetensors.index.json"
        (quantized / name).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    return quantized, plain
