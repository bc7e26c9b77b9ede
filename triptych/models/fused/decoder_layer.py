"""A decoder layer after Llama's pattern with fewer, larger operations.

transformers' layer has some sixty operations besides its products, each of which costs a few microseconds of
Python and of torch, however few rows a decode step has. Here q, k and v are one product, q and k are
normalised and rotated together, and gate and up are one product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from triptych.models.fused.merged import whole

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
_NORMS = ("input_layernorm", "post_attention_layernorm")


class FusedDecoderLayer(nn.Module):
    """A layer of Llama or Qwen in place of transformers' own: attention with rotary positions, gated MLP.

    RMSNorm before both, and perhaps of q and k, per head. It takes the original's modules as they are, plain,
    in 8 bits or a tensor-parallel share, with projections merged and norms fused; ValueError for a layer that
    has others.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        attention, mlp = _part(original, "self_attn", _ATTENTION), _part(original, "mlp", _MLP)
        self.input_layernorm, self.post_attention_layernorm = (
            getattr(_part(original, "", _NORMS), name) for name in _NORMS
        )
        self.qkv, sizes = whole([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up, self._mlp_sizes = whole([mlp.gate_proj, mlp.up_proj])
        self.o_proj, self.down_proj, self.act_fn = attention.o_proj, mlp.down_proj, mlp.act_fn
        self.config, self.layer_idx = attention.config, int(attention.layer_idx)
        self._dim, self._scaling = int(attention.head_dim), float(attention.scaling)
        self._window = getattr(attention, "sliding_window", None)
        self._heads, self._kv_heads = sizes[0] // self._dim, sizes[1] // self._dim
        #: Outputs that are rotated, and those that are not.
        self._rotated = [sizes[0] + sizes[1], sizes[2]]
        self._epsilon = 0.0
        self.register_buffer("qk_weight", None, persistent=False)
        if hasattr(attention, "q_norm"):
            self._take_norms(attention.q_norm, attention.k_norm)

    def _take_norms(self, query: nn.Module, key: nn.Module) -> None:
        """One weight [heads + kv_heads, head_dim] of both norms."""
        for norm in (query, key):
            if not isinstance(norm, nn.RMSNorm) or tuple(norm.normalized_shape) != (self._dim,):
                raise ValueError(f"{norm} is no RMSNorm of a head's {self._dim} elements")
        assert isinstance(query, nn.RMSNorm) and isinstance(key, nn.RMSNorm)
        if query.eps != key.eps or query.eps is None:
            raise ValueError(f"epsilons {query.eps} and {key.eps} of q and k differ")
        self.q_norm, self.k_norm, self._epsilon = query, key, query.eps
        rows = query.weight.expand(self._heads, -1), key.weight.expand(self._kv_heads, -1)
        self.qk_weight = torch.cat(rows)

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: object
    ) -> torch.Tensor:
        """[T, hidden_size] of hidden [T, hidden_size]; cos and sin [T, 1, head_dim] as `rotary` gives them.

        `attention` reaches the registered attention function as the keyword `attn_metadata`.
        """
        # In place of what was just computed: fresh memory costs more than the sum.
        hidden = self._attend(self.input_layernorm(hidden), cos, sin, attention).add_(hidden)
        gate, up = self.gate_up(self.post_attention_layernorm(hidden)).split(self._mlp_sizes, -1)
        result: torch.Tensor = self.down_proj(self.act_fn(gate).mul_(up))
        return result.add_(hidden)

    def _attend(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: object
    ) -> torch.Tensor:
        tokens = x.shape[0]
        both, value = self.qkv(x).split(self._rotated, -1)
        both = both.view(tokens, -1, self._dim)
        if self.qk_weight is not None:
            both = functional.rms_norm(both, (self._dim,), None, self._epsilon) * self.qk_weight
        # No addcmul: in half precision it rounds once or twice, as the number of tokens lets it vectorise.
        both = (both * cos).add_(both.roll(self._dim // 2, -1).mul_(sin))
        query, key = both.transpose(0, 1)[None].split([self._heads, self._kv_heads], 1)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(
            self,
            query,
            key,
            value.view(1, tokens, self._kv_heads, self._dim).transpose(1, 2),
            None,
            dropout=0.0,
            scaling=self._scaling,
            sliding_window=self._window,
            attn_metadata=attention,
        )
        result: torch.Tensor = self.o_proj(out.reshape(tokens, -1))
        return result


def rotary(embeddings: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, head_dim] for all layers, from transformers' [1, T, head_dim].

    What `rotate_half` would negate is negated in sin, once a step instead of in every layer.
    """
    cos, sin = (part[0, :, None] for part in embeddings)
    first, second = sin.chunk(2, -1)
    return cos, torch.cat((-first, second), -1)


def _part(layer: nn.Module, name: str, needed: tuple[str, ...]) -> Any:
    """The module of this name with its parts; ValueError where some are missing."""
    part = layer.get_submodule(name) if name in layer._modules or not name else None
    if part is None or not all(needs in part._modules for needs in needed):
        raise ValueError(f"{type(layer).__name__} has no {name} with {', '.join(needed)}")
    return part
