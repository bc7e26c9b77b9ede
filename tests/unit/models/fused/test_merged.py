"""Sibling linear layers: which are, and as one product."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextAttention, Qwen3VLTextMLP
from transformers.models.t5.modeling_t5 import T5Attention, T5DenseGatedActDense

from support.data.checkpoints import build_checkpoint
from triptych.models.families.t5 import UnbiasedSelfAttention
from triptych.models.families.trocr import PagedSelfAttention
from triptych.models.fused.merged import MergedLinear, MergedPart, merge, siblings
from triptych.models.registry import load_decoder
from triptych.models.weights.loading import parameter_bytes
from triptych.models.weights.prepack import PrepackedLinear, prepack
from triptych.models.weights.quantization import Int8Linear, quantize, replace_linears
from triptych.pd_worker.attention.attention import ATTENTION_NAME

CPU = torch.device("cpu")


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
    prepack(module)
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
