"""The registry of model families (this package's, adapters', one for all others) and layer hooks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from triptych.base.errors import ConfigError, reason_of
from triptych.base.machine.heap import trim_heap
from triptych.base.types import JsonObject
from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.checkpoint.architectures import ADAPTERS, unknown_architecture
from triptych.models.checkpoint.folder import read_config
from triptych.models.checkpoint.quantized import check_decoder, check_tower
from triptych.models.defaults import generation_defaults, resolve_device, resolve_dtype
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.weights.dequantization import check_room
from triptych.models.weights.loading import KeyMap
from triptych.models.weights.prepack import fuse_gelu, prepack
from triptych.models.weights.quantization import (
    NONE,
    check_w8a8,
    decoder_is_quantized,
    encoder_is_quantized,
    inputs_are_quantized,
    quantize_inputs,
)

__all__ = [
    "ADAPTERS",
    "FAMILIES",
    "Family",
    "family_of",
    "generation_defaults",
    "load_decoder",
    "load_encoder",
    "resolve_device",
    "resolve_dtype",
]


@dataclass(frozen=True)
class Family:
    """One architecture; its module is imported only when it is served."""

    name: str
    title: str
    architecture: str
    #: Model types of its vision and text configs, where the class takes others, too.
    parts: tuple[str, str] | None = None

    def serves(self, config: JsonObject) -> bool:
        """Whether a checkpoint of this config.json is of the family."""
        architectures = config.get("architectures") or []
        named = self.architecture in architectures or (
            not architectures and self.name == config.get("model_type")
        )
        if self.parts is None or not named:
            return named
        given = (config.get("vision_config") or {}, config.get("text_config") or {})
        return all(part.get("model_type", own) == own for part, own in zip(given, self.parts, strict=True))

    @property
    def encoder(self) -> type[EncoderSide]:
        side: type[EncoderSide] = self._module().ENCODER
        return side

    @property
    def decoder(self) -> type[DecoderSide]:
        side: type[DecoderSide] = self._module().DECODER
        return side

    @property
    def keys(self) -> KeyMap:
        keys: KeyMap = self._module().KEYS
        return keys

    def _module(self) -> Any:
        return importlib.import_module(f"triptych.models.families.{self.name}")


class GenericFamily(Family):
    """Any architecture of transformers that has no family of its own."""

    def _module(self) -> Any:
        return importlib.import_module("triptych.models.generic")


class OutsideFamily(Family):
    """An architecture that an installed package serves: its adapter has ENCODER, DECODER and KEYS."""

    def _module(self) -> Any:
        (point,) = entry_points(group=ADAPTERS, name=self.architecture)
        named = f"the adapter {point.value} for {self.architecture}"
        remedy = f"install another version of {getattr(point.dist, 'name', 'its package')}, or remove it"
        try:
            adapter: Any = point.load()
        except Exception as error:  # of any kind: code of the package
            reason = reason_of(error)
            raise ConfigError(f"{named} cannot be imported ({reason}): {remedy}") from error
        if lacking := [name for name in ("ENCODER", "DECODER", "KEYS") if not hasattr(adapter, name)]:
            raise ConfigError(f"{named} lacks {', '.join(lacking)}: {remedy}")
        return adapter


FAMILIES = (
    Family("qwen3_vl", "Qwen3-VL", "Qwen3VLForConditionalGeneration"),
    Family("qwen2_5_vl", "Qwen2.5-VL", "Qwen2_5_VLForConditionalGeneration"),
    Family("llava", "LLaVA-1.5", "LlavaForConditionalGeneration", ("clip_vision_model", "llama")),
    Family("bart", "BART", "BartForConditionalGeneration"),
    Family("mbart", "mBART", "MBartForConditionalGeneration"),
    Family("t5", "T5", "T5ForConditionalGeneration"),
    Family("trocr", "TrOCR", "VisionEncoderDecoderModel"),
    Family("whisper", "Whisper", "WhisperForConditionalGeneration"),
)


def family_of(path: Path) -> Family:
    """The family of a checkpoint folder: its own, else one from outside, else the adapter for any class.

    ConfigError where none of them has the architecture that config.json names.
    """
    config = read_config(Path(path))
    architectures = config.get("architectures") or []
    model_type = config.get("model_type", "")
    for family in FAMILIES:
        if family.serves(config):
            return family
    for architecture in architectures:
        if entry_points(group=ADAPTERS, name=architecture):
            return OutsideFamily(model_type or architecture, architecture, architecture)
    known_to_transformers = [name for name in architectures if hasattr(transformers, name)]
    if known_to_transformers:
        name = known_to_transformers[0]
        return GenericFamily(model_type or name, name, name)
    raise unknown_architecture(path, architectures or [model_type or "none"])


def load_encoder(
    path: Path, *, device: torch.device, dtype: torch.dtype, quantization: str = NONE
) -> EncoderSide:
    """Tower and projector of a checkpoint; ConfigError for one that cannot be served."""
    quantize = encoder_is_quantized(quantization)
    if quantize and inputs_are_quantized(quantization):
        check_w8a8(quantization, device)
    family = family_of(path)
    check_tower(path, family.keys.encoder_names)
    check_room(path, family.keys.encoder_names, device=device, dtype=dtype, in_8_bits=quantize)
    side = family.encoder.load(Path(path), device=device, dtype=dtype, quantize=quantize)
    speed_up_encoder(side, quantization)
    # Layers were copied one by one, and left holes between those that stay.
    trim_heap()
    return side


def speed_up_encoder(side: EncoderSide, quantization: str = NONE) -> None:
    """What follows loading: fused norms, inputs in 8 bits, packed weights."""
    side.fuse()
    if inputs_are_quantized(quantization):
        quantize_inputs(side.module)
    prepack(side.module, many_rows=True)
    fuse_gelu(side.module)


def load_decoder(
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attn_implementation: str,
    quantization: str = NONE,
    parallel: TensorParallel | None = None,
) -> DecoderSide:
    """Text model and head of a checkpoint; ConfigError for one that cannot be served.

    With `parallel` this rank's share of them (`DecoderSide.load`).
    """
    if inputs_are_quantized(quantization):
        check_w8a8(quantization, device)
    check_decoder(path, device)
    family, quantize = family_of(path), decoder_is_quantized(quantization)
    ranks = parallel.size if parallel is not None else 1
    check_room(path, family.keys.decoder_names, device=device, dtype=dtype, in_8_bits=quantize, ranks=ranks)
    side = family.decoder.load(
        Path(path),
        device=device,
        dtype=dtype,
        attn_implementation=attn_implementation,
        quantize=quantize,
        parallel=parallel if parallel is not None and parallel.size > 1 else None,
    )
    speed_up_decoder(side, quantization)
    trim_heap()
    return side


def speed_up_decoder(side: DecoderSide, quantization: str = NONE) -> None:
    """What follows loading: fused layers, inputs in 8 bits, packed weights."""
    side.fuse()
    if inputs_are_quantized(quantization):
        quantize_inputs(side.module)
    prepack(side.module)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules of its longest list; a model without a list is one layer."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[model])


def before_each_layer(model: nn.Module, call: Callable[[], object]) -> None:
    """Calls `call` before each layer of every forward, in the thread that computes it."""

    def hook(module: nn.Module, inputs: object) -> None:
        call()

    for layer in layers_of(model):
        layer.register_forward_pre_hook(hook)
