"""Linear layers that a module's source applies to one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.bart.modeling_bart import BartAttention
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextAttention, Qwen3VLTextMLP
from transformers.models.t5.modeling_t5 import T5Attention, T5DenseGatedActDense

from triptych.models.families.t5 import UnbiasedSelfAttention
from triptych.models.families.trocr import PagedSelfAttention
from triptych.models.fused.siblings import siblings


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
