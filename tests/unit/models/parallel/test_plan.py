"""What the plans say of each family's layers, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig

from support.data.checkpoints import build_checkpoint
from support.encdec.checkpoints import FAMILIES as ENCDEC_FAMILIES
from triptych.base.errors import ConfigError
from triptych.models.base import DecoderSide
from triptych.models.geometry import CrossGeometry, DecoderGeometry
from triptych.models.parallel import plan as shares
from triptych.models.parallel.plan import (
    ShardPlan,
    Style,
    check_divides,
    possible_sizes,
    rules_of_transformers,
)
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.registry import family_of

#: What the plans say of linear layers and tables of a bias, by the last part of the name.
BART = {
    "q_proj": "heads",
    "k_proj": "heads",
    "v_proj": "heads",
    "out_proj": "heads_row",
    "fc1": "column",
    "fc2": "row",
    "lm_head": "vocabulary",
}
T5 = {
    "q": "heads",
    "k": "heads",
    "v": "heads",
    "o": "heads_row",
    "relative_attention_bias": "heads",
    "wi_0": "column",
    "wi_1": "column",
    "wo": "row",
    "lm_head": "vocabulary",
}


def whole(family: str) -> DecoderSide:
    path = build_checkpoint(family)
    # As it is divided: before layers are fused.
    return family_of(path).decoder.load(
        path, device=torch.device("cpu"), dtype=torch.float32, attn_implementation="sdpa"
    )


def plan_of(side: DecoderSide) -> ShardPlan:
    plan: ShardPlan = type(side).shard_plan(side.config)  # type: ignore[attr-defined]
    return plan


@pytest.mark.parametrize("family", ENCDEC_FAMILIES)
def test_a_familys_plan_divides_every_matrix_and_leaves_norms_and_embeddings_whole(family: str) -> None:
    side = whole(family)
    wanted = T5 if family == "t5" else BART
    found: dict[str, str] = {}
    for name, style in plan_of(side).styles(side.module).items():
        if style is not Style.REPLICATE:
            found[name.rpartition(".")[2]] = style
        else:
            assert re.search(r"norm|embed_tokens|embed_positions", name)
    assert found == wanted


@pytest.mark.parametrize("kind", [nn.Linear, nn.Embedding, nn.LayerNorm])
def test_a_layer_that_the_plan_does_not_name_is_refused_by_name(kind: type[nn.Module]) -> None:
    side = whole("bart")
    plan, (name, _) = plan_of(side), next(iter(side.module.named_children()))
    side.module.get_submodule(name).register_module("gate", kind(*(4, 4)[: 2 - (kind is nn.LayerNorm)]))
    with pytest.raises(ConfigError, match=rf"says nothing of 1 layers, {name}\.gate among them"):
        plan.styles(side.module)


def test_the_numbers_in_transformers_patterns_stand_for_numbers_only() -> None:
    config = AutoConfig.from_pretrained(build_checkpoint("llava")).text_config
    plan = ShardPlan(rules_of_transformers(config.base_model_tp_plan, "model."), heads=4, kv_heads=2)
    assert plan.style("model.layers.11.self_attn.q_proj") is Style.HEADS
    assert plan.style("model.layers.11.mlp.down_proj") is Style.ROW
    assert plan.style("layers.11.mlp.down_proj") is None
    assert plan.style("model.layers.1.experts.2.mlp.down_proj") is None
    assert plan.style("model.layers.1.mlp.down_proj.lora") is None


def test_a_style_of_transformers_that_is_unknown_is_refused_with_the_layer() -> None:
    with pytest.raises(ConfigError, match=r"layers\.\*\.mlp\.experts by 'grouped_gemm'"):
        rules_of_transformers({"layers.*.mlp.experts": "grouped_gemm"}, "model.")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes"),
    [
        (4, 2, [1, 2, 4]),
        (28, 4, [1, 2, 4, 28]),
        (6, 3, [1, 3, 6]),
        (5, 5, [1, 5]),
        (12, 12, [1, 2, 3, 4, 6, 12]),
        (16, 1, [1, 2, 4, 8, 16]),
    ],
)
def test_heads_are_divided_evenly_and_kv_heads_whole(heads: int, kv_heads: int, sizes: list[int]) -> None:
    assert possible_sizes(heads, kv_heads) == sizes


def test_a_number_of_ranks_that_cannot_be_names_those_that_can() -> None:
    with pytest.raises(
        ConfigError,
        match=r"MODEL=/m: 28 attention heads and 4 KV heads cannot be divided among 3 ranks: "
        r"give --tensor-parallel one of 1, 2, 4, 28$",
    ):
        check_divides(Path("/m"), 28, 4, 3)


@given(count=st.integers(16, 4000), size=st.integers(1, 16))
def test_each_column_belongs_to_one_rank_and_ranks_differ_by_one_unit(count: int, size: int) -> None:
    bounds = [shares.columns(count, rank, size) for rank in range(size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(left[1] == right[0] for left, right in zip(bounds, bounds[1:], strict=False))
    counts = [last - first for first, last in bounds]
    unit = 16 if count >= 16 * size else 1
    assert all(number % unit == 0 for number in counts[:-1])
    assert min(counts) > 0
    assert max(counts) - min(counts) < 2 * unit


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("groups", [1, 2, 3, 6, 7])
def test_a_rank_has_the_kv_heads_that_its_heads_read(groups: int, kv_heads: int) -> None:
    plan = ShardPlan((), groups * kv_heads, kv_heads)
    for size in possible_sizes(plan.heads, kv_heads):
        for rank in range(size):
            first, last = shares.heads(plan, rank, size)
            kv_first, kv_last = shares.kv_heads(plan, rank, size)
            # As attention finds them: the same number of heads, one behind the other, for each KV head.
            each = (last - first) // (kv_last - kv_first)
            read = [kv_first + index // each for index in range(last - first)]
            assert read == [head // groups for head in range(first, last)]
            assert set(read) == set(range(kv_first, kv_last))


def test_a_ranks_geometry_counts_its_heads_and_keeps_all_else() -> None:
    whole = DecoderGeometry(3, 8, 2, 16, 64, 768, 3, 4096, 2)
    cross = CrossGeometry(3, 8, 16, 64, 1500)
    assert shares.geometry_of_rank(whole, TensorParallel(1, 2)) == DecoderGeometry(
        3, 4, 1, 16, 64, 768, 3, 4096, 2
    )
    assert shares.geometry_of_rank(whole, TensorParallel(3, 4)).num_kv_heads == 1
    assert shares.cross_of_rank(cross, TensorParallel(1, 4)) == CrossGeometry(3, 2, 16, 64, 1500)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_of_its_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"no rank {rank} of {size}"):
        TensorParallel(rank, size)
