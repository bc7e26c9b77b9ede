"""Loading of one side of a family: its own share of the checkpoint, and all of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers.initialization import no_init_weights

from triptych.base.errors import ConfigError, TriptychError
from triptych.base.progress import BYTES, Progress
from triptych.models.checkpoint.tensors import Checkpoint, Cut
from triptych.models.weights.quantization import quantize as quantize_weight
from triptych.models.weights.quantization import replace_linears

#: What older checkpoints carry and no model takes from them: it computes it, or it never used it.
_COMPUTED = re.compile(
    r"(rotary_emb\.inv_freq|embeddings\.position_ids|EncDecAttention\.relative_attention_bias\.weight"
    r"|(encoder|decoder)\.version)$"
)


@dataclass(frozen=True)
class KeyMap:
    """The map from checkpoint keys to sides, as (pattern, name in the side's module) rules.

    The first rule that matches decides. Together the sides hold the whole checkpoint; a key on both must
    match `shared`. `tied` are (name, name it may be tied to) inside one side. A decoder without rules, which
    transformers reads, has all that is not the encoder's.
    """

    encoder: tuple[tuple[str, str], ...]
    decoder: tuple[tuple[str, str], ...] = ()
    shared: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = (("lm_head.weight", "model.embed_tokens.weight"),)

    def encoder_names(self, keys: Iterable[str]) -> dict[str, str]:
        """{checkpoint key: name in the encoder side's module}."""
        return _names(self.encoder, keys)

    def decoder_names(self, keys: Iterable[str]) -> dict[str, str]:
        """{checkpoint key: name in the decoder side's module}."""
        keys = list(keys)
        if self.decoder:
            return _names(self.decoder, keys)
        tower = self.encoder_names(keys)
        return {key: key for key in keys if key not in tower}

    def check(self, keys: Iterable[str]) -> None:
        """ConfigError unless the union of the sides is the checkpoint and they share nothing unasked."""
        keys = [key for key in keys if not _COMPUTED.search(key)]
        encoder, decoder = self.encoder_names(keys), self.decoder_names(keys)
        unknown = sorted(key for key in keys if key not in encoder and key not in decoder)
        if unknown:
            raise ConfigError(f"the checkpoint has {len(unknown)} unknown tensors: {_first(unknown)}")
        both = sorted(set(encoder) & set(decoder))
        unasked = [key for key in both if not any(re.search(pattern, key) for pattern in self.shared)]
        if unasked:
            raise ConfigError(f"tensors claimed by both sides: {_first(unasked)}")


def empty_module(build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` makes, with parameters on meta and computed buffers (rotary frequencies) real.

    Building wholly on meta would leave the non-persistent buffers there, and no checkpoint holds them.
    ConfigError where the config describes nothing that can be built.
    """
    try:
        with no_init_weights():
            module = build()
    except (TriptychError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"MODEL's config.json has sizes that make no model ({reason}): correct it"
        ) from error
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    return module


def load_into(
    module: nn.Module,
    checkpoint: Checkpoint,
    names: dict[str, str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    tied: Iterable[tuple[str, str]] = (),
    computed: Mapping[str, torch.Tensor] | None = None,
    quantize: bool = False,
    cuts: Mapping[str, Cut] | None = None,
) -> None:
    """Fills `module` from the checkpoint keys of `names`; ConfigError for anything missing or misshapen.

    Tensors are copied, so that nothing depends on the files afterwards. `computed` stands in for those of
    its names that the checkpoint leaves out. With `quantize` linear layers are held in 8 bits, each as soon
    as it is read. Parameters named in `cuts` are that part of the checkpoint's; of a tied one, it is a view.
    """
    cuts = cuts or {}
    in_8_bits = replace_linears(module) if quantize else set()
    state = {
        name: _cut(cuts, name, tensor.to(device=device, dtype=dtype))
        for name, tensor in (computed or {}).items()
    }
    state |= _read(checkpoint, names, cuts, in_8_bits, device=device, dtype=dtype)
    for name, source in tied:
        if source in state:
            shared = _cut(cuts, name, state[source])
            if name not in state or torch.equal(state[name], shared):
                state[name] = shared
    try:
        result = module.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        raise ConfigError(
            f"MODEL={checkpoint.path}: its tensors do not fit its config.json: {error}"
        ) from error
    if result.missing_keys:
        raise ConfigError(f"MODEL={checkpoint.path} lacks tensors: {_first(result.missing_keys)}")
    if result.unexpected_keys:
        raise ConfigError(f"MODEL={checkpoint.path} has tensors too many: {_first(result.unexpected_keys)}")
    for name, source in tied:
        if state.get(name) is state.get(source):
            _set(module, name, module.get_parameter(source))
    left = [name for name, tensor in _tensors(module) if tensor.is_meta]
    if left:
        raise ConfigError(f"MODEL={checkpoint.path}: not loaded: {_first(left)}")
    module.to(device).eval().requires_grad_(False)


def _read(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    cuts: Mapping[str, Cut],
    in_8_bits: Collection[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """The state of the module, as far as the checkpoint has it."""
    state = {}
    # A scale counts a channel's whole input: a weight that is cut there is quantized before it is cut.
    late = {name for name, cut in cuts.items() if name in in_8_bits and cut.dim > 0}
    early = {key: cuts[name] for key, name in names.items() if name in cuts and name not in late}
    # What is rounded to 8 bits is rounded once.
    floats = torch.float32 if in_8_bits else dtype
    total = checkpoint.nbytes(names, early, dtype=floats)
    with Progress("loading weights", total, BYTES) as loading:
        for key, tensor in checkpoint.read(names, early, dtype=floats):
            name = names[key]
            if name in in_8_bits:
                weight, scale = _quantized(checkpoint, key, tensor)
                # Contiguous: a view would keep all of it.
                state[name] = (_cut(cuts, name, weight) if name in late else weight).contiguous().to(device)
                state[name.removesuffix("weight") + "scale"] = scale.to(device)
            else:
                kept = dtype if tensor.is_floating_point() else None
                state[name] = tensor.to(device=device, dtype=kept, copy=True)
            loading.advance(tensor.nbytes)
    return state


def _cut(cuts: Mapping[str, Cut], name: str, tensor: torch.Tensor) -> torch.Tensor:
    cut = cuts.get(name)
    return tensor if cut is None else cut.of(tensor)


def _quantized(checkpoint: Checkpoint, key: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if tensor.dim() != 2 or not tensor.is_floating_point():
        raise ConfigError(f"MODEL={checkpoint.path}: {key} is no matrix of floats: leave --quantization out")
    return quantize_weight(tensor)


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of the module's parameters; tied ones count once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _names(rules: tuple[tuple[str, str], ...], keys: Iterable[str]) -> dict[str, str]:
    names = {}
    for key in keys:
        if _COMPUTED.search(key):
            continue
        for pattern, replacement in rules:
            name, hits = re.subn(pattern, replacement, key, count=1)
            if hits:
                names[key] = name
                break
    return names


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _set(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, parameter)


def _first(names: Iterable[str], limit: int = 3) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (", …" if len(listed) > limit else "")
