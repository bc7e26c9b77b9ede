"""The tensor-parallel plan of a decoder: what becomes of each of its layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from torch import nn

from triptych.base.errors import ConfigError
from triptych.models.base import DecoderSide
from triptych.models.geometry import CrossGeometry, DecoderGeometry
from triptych.models.parallel.tensor_parallel import TensorParallel


class Style(StrEnum):
    """How the ranks divide a layer."""

    #: Outputs are divided: gate, up, fc1.
    COLUMN = "column"
    #: Inputs are divided, outputs summed over the ranks, the bias added once: down, fc2.
    ROW = "row"
    #: Outputs are divided by attention heads: queries. Of an embedding with a bias per head, the columns.
    HEADS = "heads"
    #: As ROW, inputs divided by attention heads: the output projection of attention.
    HEADS_ROW = "heads_row"
    #: Outputs are divided by KV heads, which several ranks hold alike where there are fewer than ranks.
    KV_HEADS = "kv_heads"
    #: The head: outputs are divided by vocabulary and gathered on rank 0.
    VOCABULARY = "vocabulary"
    #: Every rank holds the whole layer.
    REPLICATE = "replicate"
    #: Experts stacked in parameters that have a style each: their outputs are summed over the ranks.
    EXPERTS = "experts"
    #: As COLUMN, of gate and up side by side in one parameter of experts: each of them is divided.
    PACKED_COLUMN = "packed_column"
    #: As PACKED_COLUMN, where the parameter is transposed.
    PACKED_ROW = "packed_row"


#: Our style for each of transformers'; the projections of attention are recognised by their names.
_STYLES = {
    "colwise": Style.COLUMN,
    "rowwise": Style.ROW,
    "replicated_with_grad_allreduce": Style.REPLICATE,
    "embedding_rowwise": Style.REPLICATE,
    "moe_tp_experts": Style.EXPERTS,
    "packed_colwise": Style.PACKED_COLUMN,
    "packed_rowwise": Style.PACKED_ROW,
}
_BY_HEADS = {
    "q_proj": Style.HEADS,
    "k_proj": Style.KV_HEADS,
    "v_proj": Style.KV_HEADS,
    "o_proj": Style.HEADS_ROW,
}


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """(pattern of a module's whole name, style) rules, of which the first that matches decides.

    Every module with parameters of its own must have a rule: a layer that was forgotten would be whole on
    every rank, and summed as often. `heads` and `kv_heads` are those of the whole model.
    """

    rules: tuple[tuple[str, Style], ...]
    heads: int
    kv_heads: int

    def style(self, name: str) -> Style | None:
        """The style of the module of this name; None where no rule has it."""
        return next((style for pattern, style in self.rules if re.fullmatch(pattern, name)), None)

    def styles(self, module: nn.Module) -> dict[str, Style]:
        """{name: style} of all modules with parameters of their own; ConfigError for one without a rule."""
        styles_by_name, unnamed = {}, []
        for name, part in module.named_modules():
            if not any(True for _ in part.parameters(recurse=False)):
                continue
            style = self.style(name)
            if style is None:
                unnamed.append(name)
            else:
                styles_by_name[name] = style
        if unnamed:
            raise ConfigError(
                f"the tensor-parallel plan says nothing of {len(unnamed)} layers, {unnamed[0]} among them: "
                "give --tensor-parallel 1"
            )
        return styles_by_name


#: Rules of nearly every decoder: token embeddings, learned positions and norms whole, the head by vocabulary.
WHOLE: tuple[tuple[str, Style], ...] = (
    (r".+\.embed_(tokens|positions)", Style.REPLICATE),
    (r"(.+\.)?[a-z_]*norm(_embedding)?", Style.REPLICATE),
)
HEAD = ("lm_head", Style.VOCABULARY)


def rules_of_transformers(plan: Mapping[str, str], prefix: str) -> tuple[tuple[str, Style], ...]:
    """Rules from a config's `base_model_tp_plan`; ConfigError for a style that is unknown here.

    `prefix` is where the base model is in our module, with its dot.
    """
    rules = []
    for pattern, word in plan.items():
        style = _STYLES.get(word)
        if style is None:
            raise ConfigError(
                f"transformers' tensor-parallel plan divides {pattern} by {word!r}, which is unknown here: "
                "give --tensor-parallel 1"
            )
        style = _BY_HEADS.get(pattern.rpartition(".")[2], style)
        rules.append((re.escape(prefix + pattern).replace(r"\*", r"\d+"), style))
    return tuple(rules)


def possible_sizes(heads: int, kv_heads: int) -> list[int]:
    """The numbers of ranks among which so many heads can be divided, ascending."""
    return [size for size in range(1, heads + 1) if divides(heads, kv_heads, size)]


def divides(heads: int, kv_heads: int, size: int) -> bool:
    """Whether each of `size` ranks gets as many heads, and their KV heads whole."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def check_divides(path: Path, heads: int, kv_heads: int, size: int) -> None:
    """ConfigError, naming the possible numbers of ranks, where `divides` says no."""
    if not divides(heads, kv_heads, size):
        sizes = ", ".join(map(str, possible_sizes(heads, kv_heads)))
        raise ConfigError(
            f"MODEL={path}: {heads} attention heads and {kv_heads} KV heads cannot be divided among {size} "
            f"ranks: give --tensor-parallel one of {sizes}"
        )


#: Feed-forward columns and vocabulary are divided in multiples of so many, as kernels like it.
_UNIT = 16


def columns(count: int, rank: int, size: int) -> tuple[int, int]:
    """First and last of `count` columns that a rank has, nearly as many as every other, in multiples of 16.

    Together the ranks have all, each once; the last multiple may be short.
    """
    unit = _UNIT if count >= _UNIT * size else 1
    units = -(-count // unit)
    return min(count, unit * (units * rank // size)), min(count, unit * (units * (rank + 1) // size))


def heads(plan: ShardPlan, rank: int, size: int) -> tuple[int, int]:
    """First and last of the attention heads that a rank has."""
    each = plan.heads // size
    return each * rank, each * (rank + 1)


def kv_heads(plan: ShardPlan, rank: int, size: int) -> tuple[int, int]:
    """First and last of the KV heads that a rank's attention heads read."""
    if plan.kv_heads % size == 0:
        each = plan.kv_heads // size
        return each * rank, each * (rank + 1)
    first = rank * plan.kv_heads // size
    return first, first + 1


def geometry_of_rank(whole: DecoderGeometry, parallel: TensorParallel) -> DecoderGeometry:
    """The geometry of one rank: its heads and KV heads, all else whole."""
    kv = max(1, whole.num_kv_heads // parallel.size)
    return replace(whole, num_heads=whole.num_heads // parallel.size, num_kv_heads=kv)


def cross_of_rank(whole: CrossGeometry, parallel: TensorParallel) -> CrossGeometry:
    """The cross-attention of one rank: its KV heads."""
    return replace(whole, num_kv_heads=max(1, whole.num_kv_heads // parallel.size))


def take_share(side: DecoderSide, parallel: TensorParallel) -> None:
    """Makes the geometry of a side whose weights are one rank's share that of the share."""
    side.geometry = geometry_of_rank(side.geometry, parallel)
    if side.cross is not None:
        side.cross = cross_of_rank(side.cross, parallel)
