"""The two sides of a transformers class: which modules are the decoder's, and loading without the others."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from triptych.base.errors import ConfigError
from triptych.base.progress import BYTES, Progress
from triptych.models.checkpoint.config import load_config, unknown_type
from triptych.models.checkpoint.quantized import quantization_of
from triptych.models.checkpoint.tensors import Checkpoint
from triptych.models.generic.getters import with_getter
from triptych.models.weights.loading import parameter_bytes
from triptych.models.weights.quantization import Int8Linear, quantize_linears

#: Features that a class's base may ask a getter for, in the order in which they are tried.
MODALITIES = ("image", "audio", "video")
#: The layer of a retriever that makes a vector of each hidden state.
PROJECTION = "embedding_proj_layer"


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of a checkpoint's config; ConfigError for one that the installed transformers lacks."""
    name = next(iter(config.architectures or ()), "")
    cls = getattr(transformers, name, None) if name else None
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ConfigError(
            f"MODEL's architecture {name or '(config.json names none)'} is not in transformers "
            f"{transformers.__version__}: upgrade it, or give another MODEL (remote code is never run)"
        )
    return with_getter(cls)


def modality_of(model: PreTrainedModel | type[PreTrainedModel]) -> str:
    """That of a class's items: "audio" where it has a getter for sound and none for pictures."""
    parts = (model, getattr(model, "model", model))
    hears, sees = (any(hasattr(p, f"get_{m}_features") for p in parts) for m in ("audio", "image"))
    return "audio" if hears and not sees else "image"


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The whole model on meta; ConfigError for a config that describes none."""
    cls = class_of(config)
    try:
        with torch.device("meta"):
            return cls(config).eval()
    except Exception as error:  # of many kinds
        reason = " ".join(f"{type(error).__name__} {error}".split())
        reason = unknown_type(config.to_dict()) or f"describes no {cls.__name__} ({reason}): correct it"
        raise ConfigError(f"MODEL's config.json {reason}") from error


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module whose forward merges media into the token embeddings: of a retriever its `vlm`."""
    for inner in (getattr(model, name, None) for name in ("model", "vlm")):
        if inner is not None and any(hasattr(inner, f"get_{modality}_features") for modality in MODALITIES):
            return inner
    return model


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The text model; ConfigError where the class names none, or it is the model itself."""
    decoder: Any = model.get_decoder()
    if decoder is not None and decoder is not model and decoder.get_output_embeddings() is not None:
        # A language model with a head of its own, as BLIP-2 and Llama 4 have one.
        inner = decoder.get_decoder()
        decoder = getattr(decoder, "model", None) if inner is decoder else inner
    if decoder is None or decoder is model or decoder is base_of(model):
        raise ConfigError(f"{type(model).__name__} has no decoder beside its encoder: it cannot be served")
    try:
        embeddings = (model.get_input_embeddings(), head_of(model))
    except NotImplementedError:
        embeddings = (None, None)
    if None in embeddings:
        raise ConfigError(f"{type(model).__name__} names no token embedding or no head: it cannot be served")
    text_model: nn.Module = decoder
    return text_model


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The module that gives logits, scores, or a retriever's vectors.

    Of Nemotron-H Omni it is that of the language model in it.
    """
    inner: Any = model.get_decoder()
    head: nn.Module | None = model.get_output_embeddings() or inner.get_output_embeddings()
    others = (getattr(model, name, None) for name in ("score", PROJECTION))
    return next((other for other in others if other is not None), None) if head is None else head


def path_of(root: nn.Module, module: nn.Module | None) -> str:
    """The dotted name of `module` inside `root`."""
    names: list[str] = [name for name, part in root.named_modules() if part is module]
    return names[0]


def with_module(root: nn.Module, path: str, replacement: nn.Module) -> Any:
    """A copy of the modules on the way to `path`, with the replacement there and the same parameters."""
    clone = copy.copy(root)
    clone._modules = dict(root._modules)
    head, _, rest = path.partition(".")
    child = root._modules[head]
    assert child is not None
    clone._modules[head] = with_module(child, rest, replacement) if rest else replacement
    return clone


def decoder_paths(model: PreTrainedModel) -> list[str]:
    """Dotted names of the text model, the token embedding and the head; all else is the encoder's."""
    parts = (decoder_of(model), model.get_input_embeddings(), head_of(model))
    return [path_of(model, part) for part in parts]


def is_under(name: str, paths: list[str]) -> bool:
    """Whether the module or parameter of this name lies in one of `paths`."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def keep_decoder(model: PreTrainedModel) -> None:
    """Removes the encoder's modules. Loose parameters of the shells stay: initialisation names them."""
    paths = decoder_paths(model)
    above = {""} | {path.rsplit(".", up)[0] for path in paths for up in range(1, path.count(".") + 1)}
    for name in above:
        shell = model.get_submodule(name)
        for child in list(shell._modules):
            full = f"{name}.{child}".lstrip(".")
            if full not in above and not is_under(full, paths):
                shell._modules[child] = None
    _forget_tied(model)


def keep_encoder(model: PreTrainedModel) -> None:
    """Removes text model, head, and token embedding, but for an encoder that embeds codes by it."""
    *others, embedding, head = decoder_paths(model)
    kept = embedding if _embeds_codes(model) else None
    children = [f"{path}.{name}" for path in others for name in model.get_submodule(path)._modules]
    for path in sorted({head, embedding, *(children if kept else others)} - {kept}, key=len, reverse=True):
        parent, _, leaf = path.rpartition(".")
        model.get_submodule(parent)._modules[leaf] = None
    _forget_tied(model)


def _embeds_codes(model: PreTrainedModel) -> bool:
    """Whether its pictures become tokens, as those of Apertus 1.5 do."""
    getter = getattr(base_of(model), "get_image_features", None)
    return getter is not None and "get_input_embeddings" in inspect.getsource(getter)


def _forget_tied(model: PreTrainedModel) -> None:
    names = {name for name, _ in model.named_parameters()}
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {
        name: source for name, source in tied.items() if {name, source} & names and source in names
    }


def load_side(
    path: Path,
    keep: Callable[[PreTrainedModel], None],
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantize: bool = False,
    divide: Callable[[PreTrainedModel], object] | None = None,
) -> PreTrainedModel:
    """One side of the checkpoint, read by transformers, which knows the names of every release.

    The other side is dropped while all of it is still on meta, so that only this side is read. With
    `quantize` its linear layers are held in 8 bits, but for the head; `divide` keeps a rank's share of it,
    before it is copied. ConfigError for anything missing or misshapen.
    """
    whole = load_config(path)
    cls = class_of(whole)
    checkpoint = Checkpoint(path)
    given: dict[str, Any] = {}
    if checkpoint.scaled:
        # Read here: transformers would want a GPU for some formats, and further libraries for others.
        given = {"config": whole, "state_dict": checkpoint.lazy(dtype)}
    elif quantization_of(checkpoint.config) or hasattr(whole, "vlm_config"):
        # Else transformers reads it itself, with a quantization that this side's tensors do not have, and
        # without what `load_config` has put at a retriever's top.
        given = {"config": whole}

    def init(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        keep(self)

    # In the checkpoint's dtype tensors stay mapped from its files: what is cut or rounded is not held whole.
    mapped = (quantize or divide is not None) and not checkpoint.scaled
    given["dtype"] = "auto" if mapped else dtype
    # The other side's tensors are meant to be left over: not to be reported.
    names = {"__init__": init, "__module__": cls.__module__, "_keys_to_ignore_on_load_unexpected": ["."]}
    side = type(cls.__name__, (cls,), names)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, info = side.from_pretrained(  # type: ignore[attr-defined]
            None if checkpoint.scaled else path,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are named and refused below
            **given,
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise ConfigError(f"MODEL={path}: its tensors do not fit its config.json: {reason}") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    _check_loaded(path, model, info)
    if quantize:
        _quantize(path, model, is_decoder=keep is keep_decoder)
    if divide is not None:
        divide(model)
    _copy(model, device, dtype)
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return loaded


def _copy(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Puts weights on the device, in this dtype, but for those in 8 bits and their scales.

    Not as they are mapped from the file, in small pages: a decode step would take 5 % longer.
    """
    in_8_bits = [layer for layer in model.modules() if isinstance(layer, Int8Linear)]
    kept = {id(parameter) for layer in in_8_bits for parameter in (layer.weight, layer.scale)}
    with Progress("loading weights", parameter_bytes(model), BYTES) as loading:
        for parameter in model.parameters():
            read = parameter.nbytes
            own = parameter.dtype if id(parameter) in kept or not parameter.is_floating_point() else dtype
            parameter.data = parameter.data.to(device, own, copy=True)
            loading.advance(read)
    for part in model.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and buffer.is_floating_point():
                setattr(part, name, buffer.to(device, dtype))


def _quantize(path: Path, model: PreTrainedModel, *, is_decoder: bool) -> None:
    """ConfigError for a decoder most of whose weights are in no linear layers; a tower may have none."""
    name, text = type(model).__name__, decoder_of(model) if is_decoder else None
    parts = [part for part in text.modules() if not isinstance(part, _ConvNd)] if text is not None else []
    if any(p.dim() == 3 for part in parts for p in part.parameters(recurse=False)):
        raise ConfigError(
            f"MODEL={path}: the experts of {name} are not held in 8 bits: leave out --quantization"
        )
    # A shell without its decoder cannot say what its head was.
    if not quantize_linears(model, _heads(model) if is_decoder else ()) and is_decoder:
        raise ConfigError(f"MODEL={path}: {name} has no linear layers to quantize: leave out --quantization")


def _heads(model: PreTrainedModel) -> list[nn.Module]:
    """What gives logits or scores, of a language model inside, too."""
    parts = [model.get_output_embeddings()]
    parts += [part._modules.get(name) for part in model.modules() for name in ("lm_head", "score")]
    return [part for part in parts if part is not None]


def _check_loaded(path: Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lacking = {
        "lacks tensors": info["missing_keys"],
        "has misshapen tensors": [str(key) for key in info.get("mismatched_keys") or ()],
        "left on meta": [name for name, tensor in tensors if tensor.is_meta],
    }
    for what, names in lacking.items():
        if names:
            listed = ", ".join(sorted(names)[:3])
            raise ConfigError(f"MODEL={path} {what}: {listed}: fetch the checkpoint again")
