"""Fused and merged layers give the numbers of the plain ones."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextAttention,
    Qwen3VLTextDecoderLayer,
    Qwen3VLTextMLP,
)
from transformers.models.t5.modeling_t5 import T5Attention, T5DenseGatedActDense, T5LayerNorm

from support.data.checkpoints import build_checkpoint
from triptych.kernels.library import kernel_library
from triptych.models.families.t5 import UnbiasedSelfAttention
from triptych.models.families.trocr import PagedSelfAttention
from triptych.models.fused.layers import FusedDecoderLayer, fuse_layers, fuse_norms
from triptych.models.fused.merged import MergedLinear, MergedPart, merge, siblings
from triptych.models.registry import family_of, load_decoder
from triptych.models.weights import prepack
from triptych.models.weights.loading import parameter_bytes
from triptych.models.weights.prepack import PrepackedLinear
from triptych.models.weights.quantization import Int8Linear, quantize, replace_linears
from triptych.pd_worker.attention.attention import ATTENTION_NAME

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "llava")
CPU = torch.device("cpu")


def _layers(family: str) -> nn.ModuleList:
    """transformers' own layers of a checkpoint, with projections merged and norms fused."""
    path = build_checkpoint(family)
    side = family_of(path).decoder.load(path, device=CPU, dtype=torch.float32, attn_implementation="sdpa")
    merge(side.module)
    fuse_norms(side.module)
    return side.module.model.language_model.layers


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_every_text_model_are_fused_with_the_weights_that_they_had(family: str) -> None:
    layers = _layers(family)
    before = {id(parameter) for parameter in layers.parameters()}
    fuse_layers(layers)
    assert all(isinstance(layer, FusedDecoderLayer) for layer in layers)
    assert [layer.layer_idx for layer in layers] == list(range(len(layers)))
    assert {id(parameter) for parameter in layers.parameters()} == before


@pytest.mark.skipif(
    kernel_library() is None or not prepack.can_prepack(CPU, torch.bfloat16), reason="no kernel"
)
@torch.no_grad()
def test_a_few_rows_of_bfloat16_pass_a_layer_in_four_products_with_the_numbers_of_float32(monkeypatch):
    config = AutoConfig.for_model("qwen3_vl").text_config
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "head_dim": 32}
    for name, size in (sizes | {"num_key_value_heads": 2}).items():
        setattr(config, name, size)
    config._attn_implementation = "triptych_trial"
    generator = torch.Generator().manual_seed(0)
    layer = Qwen3VLTextDecoderLayer(config, 0).eval()
    for parameter in layer.parameters():
        parameter.normal_(0, 0.2, generator=generator).copy_(parameter.bfloat16())
    wide, narrow = (nn.ModuleList([copy.deepcopy(layer)]) for _ in range(2))
    narrow.bfloat16()
    for layers in (wide, narrow):
        merge(layers)
        fuse_norms(layers)
        fuse_layers(layers)
    monkeypatch.setitem(prepack.MINIMUM, torch.bfloat16, 1)
    prepack.prepack(narrow)
    rows = 5
    hidden, angles = (torch.randn(*shape, generator=generator) for shape in ((rows, 128), (2, rows, 1, 32)))
    products: list[int] = []
    inner = prepack.multiply
    monkeypatch.setattr(
        prepack, "multiply", lambda *args, **named: products.append(1) or inner(*args, **named)
    )
    found = narrow[0](hidden.bfloat16(), *angles.bfloat16(), [])
    # None where oneDNN leaves weights in a layout that our kernel does not read, as with AVX-512 alone.
    assert len(products) == (4 if narrow[0].qkv.block else 0)
    expected = wide[0](hidden.bfloat16().float(), *angles.bfloat16().float(), [])
    torch.testing.assert_close(found.float(), expected, atol=0.02 * float(expected.abs().max()), rtol=0.02)


class Scaled(Qwen3VLTextDecoderLayer):
    """Multiplies what a layer adds, as Granite does."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states + 0.9 * (super().forward(hidden_states, *args, **kwargs) - hidden_states)


class Windowed(Qwen3VLTextDecoderLayer):
    """Asks attention for something that the fused layer does not ask for."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states, *args, softcap=30.0, **kwargs)


class Needy(Qwen3VLTextDecoderLayer):
    """Takes an argument that the text model gives it."""

    def forward(self, hidden_states: torch.Tensor, cache: object, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states, **kwargs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Scaled, "other numbers"), (Windowed, "something else of attention"), (Needy, "cannot be tried")],
)
def test_layers_that_do_something_else_stay(kind, reason, caplog):
    layers = _layers("qwen3_vl")
    layers[-1].__class__ = kind
    with caplog.at_level("INFO", "triptych.models.fused.layers"):
        fuse_layers(layers)
    assert not any(isinstance(layer, FusedDecoderLayer) for layer in layers)
    assert reason in caplog.text


def test_layers_whose_projections_are_apart_stay() -> None:
    path = build_checkpoint("llava")
    side = family_of(path).decoder.load(path, device=CPU, dtype=torch.float32, attn_implementation="sdpa")
    layers = side.module.model.language_model.layers
    fuse_layers(layers)
    assert not any(isinstance(layer, FusedDecoderLayer) for layer in layers)


def test_norms_of_q_and_k_that_differ_in_epsilon_or_size_stay() -> None:
    for change in ({"eps": 1e-3}, {"normalized_shape": (32,)}):
        layers = _layers("qwen3_vl")
        for name, value in change.items():
            setattr(layers[0].self_attn.k_norm, name, value)
        fuse_layers(layers)
        assert not any(isinstance(layer, FusedDecoderLayer) for layer in layers)


class AddsOne(LlamaRMSNorm):
    """Gemma's: the weight is what is added to 1."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * (1 + self.weight) / self.weight


class OtherEpsilon(LlamaRMSNorm):
    """Its epsilon is outside of the root."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        root = hidden_states.pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * hidden_states / (root + self.variance_epsilon)


class NoEpsilon(LlamaRMSNorm):
    """Only rows of tiny numbers tell."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden_states * hidden_states.pow(2).mean(-1, keepdim=True).rsqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm])
@torch.no_grad()
def test_a_norm_of_that_formula_gives_the_same_numbers_and_keeps_its_weight(kind, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(kind(64, eps=1e-5).to(dtype))
    weight = model[0].weight
    weight.normal_()
    x = torch.randn(3, 64).to(dtype) * torch.tensor([[1.0], [30.0], [3e-3]], dtype=dtype)
    wanted = model(x)
    fuse_norms(model)
    assert type(model[0]) is nn.RMSNorm and model[0].weight is weight
    error = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(model(x), wanted, atol=error, rtol=error)


@pytest.mark.parametrize(
    "norm",
    [
        AddsOne(64, eps=1e-5),
        OtherEpsilon(64, eps=1e-5),
        NoEpsilon(64, eps=1e-5),
        nn.LayerNorm(64, bias=False),
        nn.LayerNorm(64),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_a_norm_of_another_formula_stays(norm: nn.Module) -> None:
    model = nn.Sequential(norm)
    weight = norm.weight.clone()
    fuse_norms(model)
    assert model[0] is norm and torch.equal(norm.weight, weight)


def test_other_modules_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Embedding(4, 4), nn.Dropout())
    before = list(model)
    fuse_norms(model)
    assert all(now is then for now, then in zip(model, before, strict=True))


class Projections(nn.Module):
    """q, k and v as transformers' attention modules call them."""

    def __init__(self, bias: tuple[bool, bool, bool] = (True, False, True)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(48, 32, bias=bias[0])
        self.k_proj = nn.Linear(48, 16, bias=bias[1])
        self.v_proj = nn.Linear(48, 16, bias=bias[2])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def _counted(module: nn.Module) -> list[int]:
    """Rows of every product that the merged layers of `module` compute from now on."""
    rows: list[int] = []
    for part in module.modules():
        if isinstance(part, MergedLinear):
            part.linear.register_forward_hook(lambda _, given, out: rows.append(out.numel() // out.shape[-1]))
    return rows


@pytest.mark.parametrize("bias", [(True, True, True), (False, False, False), (True, False, True)])
@torch.no_grad()
def test_each_layer_gives_what_it_gave_and_there_is_one_product(bias: tuple[bool, bool, bool]) -> None:
    module = Projections(bias)
    x = torch.randn(2, 5, 48)
    wanted = module(x)
    merge(module)
    rows = _counted(module)
    for found, expected in zip(module(x), wanted, strict=True):
        torch.testing.assert_close(found, expected)
    assert rows == [10]


@torch.no_grad()
def test_another_tensor_and_a_second_call_are_computed_anew() -> None:
    module = Projections()
    x, other = torch.randn(3, 48), torch.randn(3, 48)
    weights = [(part.weight.clone(), part.bias) for part in (module.q_proj, module.k_proj, module.v_proj)]
    merge(module)
    module.q_proj(x)
    torch.testing.assert_close(module.k_proj(other), nn.functional.linear(other, *weights[1]))
    module.k_proj(x)
    # As a static buffer that is filled again: the same tensor with other numbers.
    x.copy_(other)
    torch.testing.assert_close(module.k_proj(x), nn.functional.linear(x, *weights[1]))
    torch.testing.assert_close(module.q_proj(x), nn.functional.linear(x, *weights[0]))
    torch.testing.assert_close(module.v_proj(x), nn.functional.linear(x, *weights[2]))


def test_weights_are_held_once_and_those_of_before_are_let_go() -> None:
    module = Projections()
    before = parameter_bytes(module)
    old = [weakref.ref(part.weight) for part in (module.q_proj, module.k_proj, module.v_proj)]
    merge(module)
    # The bias that k lacked is zeros now.
    assert parameter_bytes(module) == before + 16 * 4
    assert all(found() is None for found in old)
    prepack.prepack(module)
    assert len([part for part in module.modules() if isinstance(part, nn.Linear | PrepackedLinear)]) == 1


def test_a_weight_or_a_layer_that_is_something_elses_too_stays_apart() -> None:
    module = Projections()
    module.embed = nn.Embedding(16, 48)
    module.k_proj.weight = module.embed.weight
    holder = nn.ModuleList([module, nn.ModuleDict({"value": module.v_proj})])
    merge(holder)
    assert type(module.q_proj) is type(module.k_proj) is type(module.v_proj) is nn.Linear
    assert module.k_proj.weight is module.embed.weight


@pytest.mark.parametrize("bias", [(True, False, True), (False, True, True), (False, False, False)])
@torch.no_grad()
def test_layers_in_8_bits_are_merged_with_their_scales(bias: tuple[bool, bool, bool]) -> None:
    plain, module = Projections(bias), Projections(bias)
    replace_linears(module)
    for name in ("q_proj", "k_proj", "v_proj"):
        layer, original = getattr(module, name), getattr(plain, name)
        weight, scale = quantize(original.weight)
        layer.bias = original.bias
        layer.weight, layer.scale = (nn.Parameter(part, requires_grad=False) for part in (weight, scale))
    x = torch.randn(7, 48)
    wanted = module(x)
    merge(module)
    assert isinstance(module.q_proj, MergedLinear) and isinstance(module.q_proj.linear, Int8Linear)
    for found, expected in zip(module(x), wanted, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "family", ["qwen3_vl", "qwen2_5_vl", "llava", "bart", "mbart", "t5", "trocr", "whisper"]
)
def test_every_familys_decoder_is_served_with_merged_projections(family: str) -> None:
    decoder = load_decoder(
        build_checkpoint(family), device=CPU, dtype=torch.float32, attn_implementation=ATTENTION_NAME
    )
    layers = [name for name, part in decoder.module.named_modules() if isinstance(part, MergedPart)]
    # A fused layer holds the product alone.
    assert bool(layers) != (family in ("qwen3_vl", "qwen2_5_vl", "llava"))


def test_the_projections_of_attention_and_of_a_gated_mlp_are_found_in_their_own_code() -> None:
    assert siblings(Qwen3VLTextAttention) == (("q_proj", "k_proj", "v_proj"),)
    assert siblings(Qwen3VLTextMLP) == siblings(Qwen2_5_VLMLP) == (("gate_proj", "up_proj"),)
    assert siblings(T5DenseGatedActDense) == (("wi_0", "wi_1"),)
    assert siblings(PagedSelfAttention) == (("q_proj", "k_proj", "v_proj"),)
    assert siblings(UnbiasedSelfAttention) == (("q", "k", "v"),)


def test_keys_of_attention_that_may_also_be_cross_attention_are_those_of_its_queries_input() -> None:
    assert siblings(BartAttention) == (("q_proj", "k_proj", "v_proj"),)
    assert siblings(T5Attention)[0] == ("q", "k", "v")


def test_layers_that_follow_each_other_under_one_name_are_no_siblings() -> None:
    assert siblings(CLIPMLP) == ()


class Branches(nn.Module):
    def forward(self, x: torch.Tensor, flag: bool, other: Any) -> Any:
        y = other
        if flag:
            y = x
        a, b = self.a(x), self.b(y)
        x = x + 1
        c = self.c(x)
        for x in other:
            c = c + self.d(x)
        return a, b, c, [self.e(part) for part in other], (lambda x: self.f(x)), self.g(other, 1)


def test_a_name_means_what_was_assigned_to_it_last_on_either_branch() -> None:
    assert siblings(Branches) == (("a", "b"),)


def test_a_class_without_source_has_none() -> None:
    assert siblings(type("Made", (nn.Module,), {"forward": max})) == ()
