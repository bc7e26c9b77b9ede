"""The probe of a decoder: one forward of two tokens, usually on meta, in which its attention is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from triptych.base.errors import ConfigError
from triptych.models.geometry import KVShape, LayerRule, SpanRule
from triptych.models.recurrent import (
    RECURRENT_LAYERS,
    StateRecorder,
    StateShape,
    cache_keyword,
    keep_inside,
    learn_states,
)

#: The attention implementation of a probe.
PROBE = "triptych_probe"
#: Keywords of an attention function that the paged one does not have.
_UNKNOWN = (
    "position_bias",
    "attention_bias",
    "block_mask",
    "score_mod",
    "head_mask",
    "topk_indices",
)
#: Types of layers that keep keys and values, or states of a kind that `triptych.models.recurrent` has.
_ATTENDING = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
#: Types of layers of their own that keep nothing.
_STATELESS = frozenset({"mlp", "moe"})
_LAYER_TYPES = _ATTENDING | _STATELESS | RECURRENT_LAYERS
_TOKENS = 2


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """One layer's call of its attention function. `causal`: by itself no token attends to a later one."""

    shape: KVShape
    heads: int
    window: int | None
    causal: bool = True


#: Of a layer that keeps a state alone.
_NO_ATTENTION = ProbedLayer(KVShape(0, 0, 0), 0, None)


def check_layer_types(name: str, config: Any) -> None:
    """ConfigError, by name, for layers that keep something else than keys, values and known states."""
    types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if types:
        raise ConfigError(f"{name} has layers of type {', '.join(sorted(types))}: they are not served yet")


def recurrent_layers(config: Any) -> list[int]:
    """The layers that keep a state, by the config's `layer_types`."""
    return _layers_of(config, RECURRENT_LAYERS)


def _layers_of(config: Any, kinds: frozenset[str]) -> list[int]:
    types = getattr(config, "layer_types", None) or ()
    return [layer for layer, kind in enumerate(types) if kind in kinds]


def probe(
    name: str, decoder: nn.Module, width: int, position_rows: int, inputs: Mapping[str, torch.Tensor]
) -> tuple[list[ProbedLayer], tuple[StateShape, ...]]:
    """The attention call of each layer, in their order, and the states of all recurrent layers.

    A layer that does not attend has keys and values without elements. `inputs` are those of two tokens,
    [2, ...] each.

    ConfigError for attention that the paged function cannot compute. The decoder's attention implementation
    is the probe's afterwards.
    """
    config: Any = decoder.config
    check_layer_types(name, config)
    parameter = next(decoder.parameters())
    device, dtype = parameter.device, parameter.dtype
    shape = (position_rows, 1, _TOKENS) if position_rows > 1 else (1, _TOKENS)
    calls: dict[int, ProbedLayer] = {}
    config._attn_implementation_internal = PROBE
    restore = _without_experts(decoder) if device.type == "meta" else []
    # A value that decides the way is unknown on meta: floats are embeddings, others such decisions.
    given = {key: x for key, x in inputs.items() if x.is_floating_point() or device.type != "meta"}
    recurrent = recurrent_layers(config)

    @torch.no_grad()
    def run(cache: Mapping[str, StateRecorder]) -> None:
        decoder(
            inputs_embeds=torch.zeros(1, _TOKENS, width, dtype=dtype, device=device),
            position_ids=torch.arange(_TOKENS, device=device).expand(shape),
            use_cache=False,
            attn_metadata=calls,
            **cache,
            **{key: x[None].to(device) for key, x in given.items()},
        )

    states: tuple[StateShape, ...] = ()
    try:
        if recurrent:
            keep_inside(decoder)
            keyword = cache_keyword(decoder.forward)
            states = learn_states(lambda recorder: run({keyword: recorder}), recurrent)
        else:
            run({})
    except ConfigError:
        raise
    except Exception as error:  # of any kind: code of the class
        reason = " ".join(f"{type(error).__name__} {error}".split())[:300]
        raise ConfigError(f"{name}: its decoder cannot be probed ({reason}): it cannot be served") from error
    finally:
        for module in restore:
            del module.forward
    layers = range(config.num_hidden_layers)
    stateless = _layers_of(config, _STATELESS)
    if not calls or {*calls, *recurrent, *stateless} != set(layers):
        raise ConfigError(f"{name}: only layers {sorted(calls)} attend through the attention interface")
    return [calls.get(layer, _NO_ATTENTION) for layer in layers], states


def _record(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    attn_metadata: dict[int, ProbedLayer] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    name = type(module).__name__
    if attn_metadata is None:
        raise ConfigError(f"{name} does not hand keywords to its attention function: it cannot be served")
    if attention_mask is not None:
        raise ConfigError(f"{name} makes an attention mask of its own: it cannot be served")
    if unknown := [option for option in _UNKNOWN if options.get(option) is not None]:
        raise ConfigError(f"{name} attends with {', '.join(unknown)}: it cannot be served")
    shape = KVShape(key.shape[1], key.shape[-1], value.shape[-1])
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    attn_metadata[layer] = ProbedLayer(
        shape, query.shape[1], sliding_window, bool(getattr(module, "is_causal", True))
    )
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(PROBE, _record)


def layer_rules(
    config: Any, calls: list[ProbedLayer], spans: Mapping[str, SpanRule]
) -> tuple[LayerRule, ...]:
    """What each layer reaches; `spans` has the rule of each layer type, by its name in `layer_types`."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * len(calls)
    rules = []
    for call, kind in zip(calls, types, strict=True):
        window = call.window
        if window is None and kind == "sliding_attention":
            window = config.sliding_window
        chunk = config.attention_chunk_size if kind == "chunked_attention" else None
        rules.append(LayerRule(window, chunk, spans.get(kind, spans.get("full_attention", SpanRule.NONE))))
    return tuple(rules)


def _without_experts(decoder: nn.Module) -> list[Any]:
    """Makes experts, MLPs and norms return what they are given.

    How many rows an expert gets is unknown on meta; the others change no shape, and take most of the time.
    The modules whose forward it replaced.
    """
    replaced: list[Any] = []
    for module in decoder.modules():
        stacked = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
        if not stacked and any(parameter.dim() == 3 for parameter in module.parameters()):
            continue  # it holds experts, and may give back more than what it was given
        if stacked or type(module).__name__.endswith(("Experts", "NaiveMoe", "MLP", "Norm")):
            module.forward = lambda *given, **named: (*given, *named.values())[0]
            replaced.append(module)
    return replaced
