"""A rank's share of any class's decoder, by transformers' tensor-parallel plan for its text model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from triptych.base.errors import ConfigError
from triptych.models.checkpoint.tensors import Cut
from triptych.models.fused.layers import check_layer
from triptych.models.generic.probe import probe
from triptych.models.generic.sides import (
    PROJECTION,
    decoder_of,
    empty_model,
    head_of,
    keep_decoder,
    load_side,
    path_of,
)
from triptych.models.geometry import DecoderGeometry
from triptych.models.parallel.plan import (
    ShardPlan,
    Style,
    check_divides,
    geometry_of_rank,
    rules_of_transformers,
)
from triptych.models.parallel.sharding import divide, join
from triptych.models.parallel.tensor_parallel import TensorParallel


def load_rank(
    path: Path,
    config: PreTrainedConfig,
    geometry: DecoderGeometry,
    parallel: TensorParallel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantize: bool = False,
) -> PreTrainedModel:
    """Reads the whole decoder and keeps the share. ConfigError for a class that only one rank can serve."""
    plan = _plan(path, config, geometry, parallel)
    cuts: dict[str, Cut] = {}
    tied = False

    def keep_share(model: PreTrainedModel) -> None:
        nonlocal tied
        tied = _weight(head_of(model)) is _weight(model.get_input_embeddings())
        cuts.update(divide(model, plan, parallel))

    module = load_side(
        path,
        keep_decoder,
        device=device,
        dtype=dtype,
        quantize=quantize,
        divide=keep_share,
    )
    if tied:
        # Rows of the embedding, of which there is one copy.
        head, rows = path_of(module, head_of(module)), _weight(module.get_input_embeddings())
        module.get_submodule(head).weight = nn.Parameter(cuts[f"{head}.weight"].of(rows), requires_grad=False)
    join(module, plan, parallel, cuts)
    return module


def _weight(module: Any) -> Any:
    return getattr(module, "weight", None)


def _plan(
    path: Path, config: PreTrainedConfig, geometry: DecoderGeometry, parallel: TensorParallel
) -> ShardPlan:
    """The plan, proven on meta: every layer attends with the heads of one rank."""
    model = empty_model(config)
    name, decoder = type(model).__name__, decoder_of(model)
    text: Any = decoder.config
    own: Any = getattr(text, "base_model_tp_plan", None) or _plan_of_layers(decoder)
    if geometry.states or geometry.kv_shapes:
        raise _refusal(path, name, "its layers keep states, or keys and values of different shapes")
    if not own:
        raise _refusal(path, name, "transformers has no tensor-parallel plan for its text model")
    keep_decoder(model)
    path_of_head = path_of(model, head_of(model))
    # A retriever's head is small, and rank 0 alone computes vectors.
    style = Style.REPLICATE if path_of_head == PROJECTION else Style.VOCABULARY
    head = (re.escape(path_of_head), style)
    rules = rules_of_transformers(own, f"{path_of(model, decoder)}.")
    # What transformers' plan leaves out is whole on every rank, and nothing of it is summed.
    plan = ShardPlan((*rules, head, (".*", Style.REPLICATE)), geometry.num_heads, geometry.num_kv_heads)
    check_divides(path, plan.heads, plan.kv_heads, parallel.size)
    divide(model, plan, parallel)
    calls, _ = probe(name, decoder, geometry.hidden_size, geometry.position_rows, {})
    share = geometry_of_rank(geometry, parallel)
    if any((call.heads, call.shape.heads) != (share.num_heads, share.num_kv_heads) for call in calls):
        raise _refusal(path, name, "transformers' plan does not divide its attention")
    return plan


#: transformers' plan for Llama, which Qwen3-VL's text model, whose layers are after its pattern, lacks.
_LLAMA = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
    "mlp.gate_proj": "colwise",
    "mlp.up_proj": "colwise",
    "mlp.down_proj": "rowwise",
}


def _plan_of_layers(decoder: Any) -> dict[str, str]:
    """The plan of a text model whose layers are after Llama's pattern; empty where one is not."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return {}
    try:
        for layer in layers:
            check_layer(layer)
    except ValueError:
        return {}
    return {f"layers.*.{name}": style for name, style in _LLAMA.items()}


def _refusal(path: Path, name: str, reason: str) -> ConfigError:
    return ConfigError(f"MODEL={path}: {name} is served by one rank, as {reason}: give --tensor-parallel 1")
