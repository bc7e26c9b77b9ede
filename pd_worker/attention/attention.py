"""Attention over paged keys and values, as an attention function of transformers, and its backends.

One flattened ragged batch per step: first the sequences that compute one token, then the prefill chunks.
"triton" (`block_attention`, CUDA) and "cpu" (`cpu_attention`, C++) read keys and values in their blocks;
"sdpa" (`gathered_attention`) gathers them, sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import torch
from transformers import AttentionInterface

from triptych.base.errors import ConfigError
from triptych.kernels.cpu_attention import takes
from triptych.kernels.library import kernel_library
from triptych.models.geometry import LayerRule
from triptych.pd_worker.attention.block_attention import attend_in_blocks
from triptych.pd_worker.attention.cpu_attention import attend_on_cpu
from triptych.pd_worker.attention.gathered_attention import attend_gathered
from triptych.pd_worker.attention.metadata import AttentionMetadata

#: Values of --attention-backend.
BACKENDS = ("auto", "triton", "cpu", "sdpa")


def backend_on(device: torch.device, name: str) -> str:
    """The backend that this --attention-backend is on a device; ConfigError where it has none such."""
    if name == "triton" and device.type != "cuda":
        raise ConfigError("--attention-backend triton is for CUDA: use auto, which is cpu on a CPU")
    if name == "cpu" and (device.type != "cpu" or kernel_library() is None):
        raise ConfigError(
            "--attention-backend cpu is for a CPU, and needs g++ or a wheel with kernels: use auto"
        )
    if name != "auto":
        return name
    if device.type == "cuda":
        return "triton" if find_spec("triton") is not None else "sdpa"
    return "cpu" if device.type == "cpu" and kernel_library() is not None else "sdpa"


def gathers(backend: str, dtype: torch.dtype) -> bool:
    """Whether this backend gathers keys and values of this type."""
    return backend == "sdpa" or (backend == "cpu" and not takes(dtype))


#: The name to load a decoder with.
ATTENTION_NAME = "triptych_paged"
#: Keywords of features that this function does not support; they are refused, never ignored.
_UNSUPPORTED = ("position_bias", "attention_bias", "block_mask", "score_mod", "head_mask")


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attn_metadata: AttentionMetadata | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] to [1, T, heads, dim of the values].

    Or [T, heads, 1, dim] and [T, kv_heads, 1, dim] to [T, 1, heads, dim].

    `s_aux` [heads] are attention sinks: each is the score of one more key, whose value is zero.
    A module with `is_cross` attends to the cross tables; its key and value are ignored.
    NotImplementedError for options of the model that are not supported.
    """
    if len(query) > 1:
        # One token of each sequence, as recurrent layers need them.
        q, k, v = query.transpose(0, 2), key.transpose(0, 2), value.transpose(0, 2)
        how = (attention_mask, scaling, dropout, sliding_window, softcap, attn_metadata, s_aux)
        out, _ = paged_attention(module, q, k, v, *how, **kwargs)  # type: ignore[arg-type]
        return out.transpose(0, 1), None
    _refuse_unsupported(attention_mask, dropout, attn_metadata, kwargs)
    assert attn_metadata is not None
    meta, q = attn_metadata, query[0]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    cache = meta.cache
    rule = meta.layer_rules[layer] if meta.layer_rules else LayerRule(sliding_window)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.empty(q.shape[1], q.shape[0], cache.values[layer].shape[-1], dtype=q.dtype, device=q.device)
    cross = meta.cross is not None and bool(getattr(module, "is_cross", False))
    if not cross:
        if kwargs.get("is_causal") is False:
            raise NotImplementedError(f"{ATTENTION_NAME} is causal")
        cache.write(layer, meta.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    attend = attend_in_blocks if meta.backend == "triton" else attend_on_cpu
    if gathers(meta.backend, q.dtype):
        attend = attend_gathered
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    attend(q, layer, meta, rule, scale, softcap, out, sinks=sinks, cross=cross)
    return out[None], None


def _refuse_unsupported(
    attention_mask: torch.Tensor | None,
    dropout: float,
    attn_metadata: AttentionMetadata | None,
    kwargs: Mapping[str, object],
) -> None:
    if attn_metadata is None:
        raise NotImplementedError(f"{ATTENTION_NAME} needs attn_metadata")
    if attention_mask is not None or dropout:
        raise NotImplementedError(f"{ATTENTION_NAME} does not support attention_mask and dropout")
    given = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    # A bias made for a flattened batch has no meaning here; the metadata's bias, by positions, replaces it.
    if given == ["position_bias"] and attn_metadata.bias is not None:
        return
    if given:
        raise NotImplementedError(f"{ATTENTION_NAME} does not support {', '.join(given)}")


AttentionInterface.register(ATTENTION_NAME, paged_attention)
