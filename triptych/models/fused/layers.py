"""Fused decoder layers and norms in the place of transformers' own, where both give the same numbers."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from triptych.kernels.cpu_attention import rotate, rotates
from triptych.models.fused.merged import merge, whole
from triptych.models.weights.prepack import PrepackedLinear

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
_NORMS = ("input_layernorm", "post_attention_layernorm")


class FusedDecoderLayer(nn.Module):
    """A layer of Llama or Qwen in place of transformers' own: attention with rotary positions, gated MLP.

    RMSNorm before both, and perhaps of q and k, per head. It takes the original's modules as they are, plain,
    in 8 bits or a tensor-parallel share, with projections merged and norms fused; ValueError for a layer that
    has others. transformers' layer has some sixty operations besides its products, each of which costs a few
    microseconds of Python and of torch, however few rows a decode step has.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.qkv: Any
        self.gate_up: Any
        self.o_proj: Any
        self.down_proj: Any
        attention, mlp = _part(original, "self_attn", _ATTENTION), _part(original, "mlp", _MLP)
        self.input_layernorm, self.post_attention_layernorm = (
            getattr(_part(original, "", _NORMS), name) for name in _NORMS
        )
        self.qkv, sizes = whole([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up, self._mlp_sizes = whole([mlp.gate_proj, mlp.up_proj])
        self.o_proj, self.down_proj, self.act_fn = attention.o_proj, mlp.down_proj, mlp.act_fn
        self.config, self.layer_idx = attention.config, int(attention.layer_idx)
        self._dim, self._scaling = int(attention.head_dim), float(attention.scaling)
        # Mistral's asks its config.
        window = getattr(self.config, "sliding_window", None)
        self._window = getattr(attention, "sliding_window", window)
        self._heads, self._kv_heads = sizes[0] // self._dim, sizes[1] // self._dim
        #: Outputs that are rotated, and those that are not.
        self._rotated = [sizes[0] + sizes[1], sizes[2]]
        self._epsilon = 0.0
        self._fused: bool | None = None
        self.register_buffer("qk_weight", None, persistent=False)
        if hasattr(attention, "q_norm"):
            self._take_norms(attention.q_norm, attention.k_norm)

    @property
    def head_dim(self) -> int:
        return self._dim

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
        if self._fuses(hidden):
            out = self._attend(self.qkv.multiply(hidden, norm=self.input_layernorm), cos, sin, attention)
            hidden = self.o_proj.multiply(out, residual=hidden)
            inner = self.gate_up.multiply(hidden, norm=self.post_attention_layernorm, gated=True)
            result: torch.Tensor = self.down_proj.multiply(inner, residual=hidden)
            return result
        # In place of what was just computed: fresh memory costs more than the sum.
        out = self._attend(self.qkv(self.input_layernorm(hidden)), cos, sin, attention)
        hidden = self.o_proj(out).add_(hidden)
        gate, up = self.gate_up(self.post_attention_layernorm(hidden)).split(self._mlp_sizes, -1)
        result = self.down_proj(self.act_fn(gate).mul_(up))
        return result.add_(hidden)

    def _fuses(self, hidden: torch.Tensor) -> bool:
        """Whether all of the layer's weights take what stands beside their products as a part of them."""
        if self._fused is None:
            norms = (self.input_layernorm, self.post_attention_layernorm)
            layers = (self.qkv, self.o_proj, self.gate_up, self.down_proj)
            self._fused = (
                all(type(layer) is PrepackedLinear and layer.fuses(hidden[:1]) for layer in layers)
                and all(type(norm) is nn.RMSNorm and norm.weight.dtype == hidden.dtype for norm in norms)
                and type(self.act_fn) in (nn.SiLU, SiLUActivation)
                and self._mlp_sizes[0] == self._mlp_sizes[1]
            )
        return self._fused and bool(self.qkv.fuses(hidden))

    def _attend(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: object
    ) -> torch.Tensor:
        """Attention's output [T, heads x head_dim] of the merged projections [T, ...]."""
        tokens = qkv.shape[0]
        both, value = qkv.split(self._rotated, -1)
        both = both.view(tokens, -1, self._dim)
        if rotates(both, cos, sin, self.qk_weight):
            rotate(both, cos, sin, self.qk_weight, self._epsilon)
        else:
            both = self._normed_and_rotated(both, cos, sin)
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
        result: torch.Tensor = out.reshape(tokens, -1)
        return result

    def _normed_and_rotated(self, both: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """What `rotate` does, by torch."""
        if self.qk_weight is not None:
            both = functional.rms_norm(both, (self._dim,), None, self._epsilon) * self.qk_weight
        # No addcmul: in half precision it rounds once or twice, as the number of tokens lets it vectorise.
        return (both * cos).add_(both.roll(self._dim // 2, -1).mul_(sin))


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


logger = logging.getLogger(__name__)

#: The attention function of a trial.
_TRIAL = "triptych_trial"
#: Sizes of a trial, small and all different.
_SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
_ERROR = 1e-4


def fuse_layers(
    layers: nn.ModuleList, check: Callable[[Sequence[FusedDecoderLayer]], None] = lambda _: None
) -> str:
    """Puts a `FusedDecoderLayer` in the place of each layer; of none where one would give other numbers.

    That is tried with small layers of the same classes and config, and what `check` raises a ValueError for
    stays, too. Projections are merged and norms fused before. The reason why they stay, empty if they do not.
    """
    try:
        fused = [FusedDecoderLayer(layer) for layer in layers]
        for layer, ours in zip(layers, fused, strict=True):
            _try(type(layer), ours.config, ours.layer_idx)
        check(fused)
    except ValueError as error:
        logger.info("the decoder's layers are transformers' own: %s", error)
        return str(error)
    for index, ours in enumerate(fused):
        layers[index] = ours
    return ""


def check_layer(layer: nn.Module) -> None:
    """ValueError where a layer, of any sizes and with or without weights, is not after Llama's pattern."""
    attention = _part(layer, "self_attn", _ATTENTION)
    _try(type(layer), attention.config, int(attention.layer_idx))


@torch.no_grad()
def _try(kind: type[nn.Module], config: PreTrainedConfig, index: int) -> None:
    """ValueError unless a fused layer does the same as one of `kind`, the attention function included."""
    config = copy.deepcopy(config)
    for name, size in _SIZES.items():
        setattr(config, name, size)
    config._attn_implementation = _TRIAL
    generator = torch.Generator().manual_seed(index)
    try:
        layer = kind(config, index).float().eval()
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5, generator=generator)
        ours = copy.deepcopy(layer)
        merge(ours)
        fuse_norms(ours)
        fused = FusedDecoderLayer(ours)
        hidden = torch.randn(5, config.hidden_size, generator=generator)
        angles = torch.randn(2, 1, 5, config.head_dim, generator=generator)
        seen: list[Mapping[str, Any]] = []
        expected = layer(hidden[None], position_embeddings=tuple(angles), attn_metadata=seen)
        result = fused(hidden, *rotary((angles[0], angles[1])), seen)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{kind.__name__} cannot be tried: {error}") from error
    alike = result.shape == expected[0].shape
    off = (result - expected[0]).abs().max() / expected[0].abs().max() if alike else 1.0
    if not off < _ERROR:
        raise ValueError(f"{kind.__name__} {index} gives other numbers, off by {float(off):.1g}")
    if len(seen) != 2 or seen[0] != seen[1]:
        raise ValueError(f"{kind.__name__} {index} asks something else of attention: {seen}")


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Plain causal attention; what it was asked for besides goes into the list that is `attn_metadata`."""
    options = kwargs.pop("attn_metadata")
    options.append({name: value for name, value in kwargs.items() if value})
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=kwargs.get("scaling"), enable_gqa=True
    )
    return out.transpose(1, 2), None


AttentionInterface.register(_TRIAL, _attend)


#: What the families call the number under the root.
_EPSILONS = ("variance_epsilon", "eps")
#: By dtype: how far a result may be off, relative to the largest.
_ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def fuse_norms(module: nn.Module) -> None:
    """Puts an `nn.RMSNorm` in the place of every norm that gives the same numbers, whatever its class.

    Each class is tried on random rows, tiny ones among them, which the epsilon decides.
    """
    alike: dict[type[nn.Module], bool] = {}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            fused = None if child is None else _candidate(child)
            if child is None or fused is None:
                continue
            kind = type(child)
            if kind not in alike:
                alike[kind] = _same_numbers(child, fused)
            if alike[kind]:
                setattr(parent, name, fused)


def _candidate(norm: nn.Module) -> nn.RMSNorm | None:
    """The torch module that `norm` may be; None for one that has not the parts of an RMSNorm."""
    weight = norm._parameters.get("weight")
    epsilon = next(
        (value for name in _EPSILONS if isinstance(value := getattr(norm, name, None), float)), None
    )
    if isinstance(norm, nn.RMSNorm) or weight is None or epsilon is None:
        return None
    # Of itself and the rows: a norm with a gate takes that, too.
    if len(inspect.signature(type(norm).forward).parameters) != 2:
        return None
    if (
        weight.dim() != 1
        or weight.is_meta
        or weight.dtype not in _ERRORS
        or len(list(norm.parameters())) != 1
    ):
        return None
    fused = nn.RMSNorm(len(weight), epsilon, device="meta")
    fused.weight = weight
    return fused


@torch.no_grad()
def _same_numbers(norm: nn.Module, fused: nn.RMSNorm) -> bool:
    weight, epsilon = fused.weight, fused.eps or 0.0
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, len(weight), generator=generator).to(weight.device, weight.dtype)
    # Of the last row the mean square is about epsilon; a mean that is not 0 tells it from a LayerNorm.
    sizes = torch.tensor([1.0, 8.0, 0.1, epsilon**0.5], device=weight.device, dtype=weight.dtype)
    rows = (rows + 0.5) * sizes[:, None]
    # The copy's weight is no 1, since a checkpoint's may be, and a formula may add 1 to it.
    probe = nn.RMSNorm(len(weight), epsilon, device="meta")
    drawn = torch.randn(len(weight), generator=generator).to(weight.device, weight.dtype)
    kept = norm.weight
    try:
        norm.weight = probe.weight = nn.Parameter(drawn, requires_grad=False)
        theirs, ours = norm(rows), probe(rows)
    finally:
        norm.weight = kept
    if not isinstance(theirs, torch.Tensor) or theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return False
    off = (theirs.float() - ours.float()).abs().max()
    return bool(off <= _ERRORS[weight.dtype] * theirs.float().abs().max())
