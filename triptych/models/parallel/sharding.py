"""Loading of a decoder, or of a rank's share as its plan says, and the layers that join the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn import functional

from triptych.base.errors import ConfigError
from triptych.models.checkpoint.tensors import Checkpoint, Cut
from triptych.models.parallel import plan as shares
from triptych.models.parallel.plan import ShardPlan, Style, check_divides
from triptych.models.parallel.tensor_parallel import TensorParallel
from triptych.models.weights.loading import load_into
from triptych.models.weights.quantization import Int8Linear


class RowParallelLinear(nn.Module):
    """A linear layer over this rank's part of the inputs; outputs are summed over the ranks.

    `linear` is the rank's share, in any form that layers have here: plain, prepacked or in 8 bits. Its bias
    is added once, after the sum.
    """

    def __init__(self, linear: nn.Module, parallel: TensorParallel) -> None:
        super().__init__()
        bias = linear.bias
        self.bias = bias if isinstance(bias, nn.Parameter) else None
        linear.bias = None  # type: ignore[assignment]
        self.linear = linear
        self._parallel = parallel

    @property
    def weight(self) -> torch.Tensor:
        """This rank's part; T5 asks for its dtype."""
        weight: torch.Tensor = self.linear.weight  # type: ignore[assignment]
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., this rank's inputs] to [..., out_features], the same on all ranks."""
        out = self._parallel.all_reduce(self.linear(x))
        return out if self.bias is None else out + self.bias


class VocabularyParallelHead(nn.Module):
    """A head over this rank's part of the vocabulary; the logits are gathered on rank 0.

    `linear` computes this rank's columns of `counts`, the columns of all ranks.
    """

    def __init__(self, linear: nn.Module, counts: list[int], parallel: TensorParallel) -> None:
        super().__init__()
        self.linear = linear
        self._counts = counts
        self._parallel = parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] to [N, vocab_size]; on ranks other than 0 NaN, of which no memory is taken."""
        logits = self._parallel.gather(self.linear(hidden), self._counts)
        if logits is None:
            return hidden.new_full((), float("nan")).expand(*hidden.shape[:-1], sum(self._counts))
        return logits


class TiedRows(nn.Module):
    """A head without a bias that is rows `first` to `last` of the token embedding, which it does not copy."""

    def __init__(self, embedding: nn.Parameter, first: int, last: int) -> None:
        super().__init__()
        self.weight = embedding
        self._first, self._last = first, last

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] to [N, last - first]."""
        return functional.linear(hidden, self.weight[self._first : self._last])


_ROWS = (Style.ROW, Style.HEADS_ROW)
#: The dimension by which a parameter of stacked experts is divided, and how many layers are in it.
_STACKED = {Style.ROW: (2, 1), Style.COLUMN: (1, 1), Style.PACKED_COLUMN: (1, 2), Style.PACKED_ROW: (2, 2)}


def divide(module: nn.Module, plan: ShardPlan, parallel: TensorParallel) -> dict[str, Cut]:
    """Shrinks the layers of a module on meta to this rank's share; {parameter: its part of the checkpoint's}.

    Attention modules count the heads of the share afterwards. ConfigError for a layer that the plan does not
    name, or cannot divide so.
    """
    cuts: dict[str, Cut] = {}
    for name, style in plan.styles(module).items():
        if style is Style.REPLICATE:
            continue
        layer = module.get_submodule(name)
        if style is Style.EXPERTS:
            _divide_experts(name, layer, plan, parallel)
        elif isinstance(layer, nn.Linear | Int8Linear):
            cuts |= _divide_linear(name, layer, style, plan, parallel)
        elif isinstance(layer, nn.Embedding) and style is Style.HEADS:
            cuts |= _divide_table(name, layer, plan, parallel)
        else:
            raise ConfigError(
                f"{name} is a {type(layer).__name__}, which cannot be divided by {style}: "
                "give --tensor-parallel 1"
            )
        if style is Style.HEADS:
            _count_share(module.get_submodule(name.rpartition(".")[0]), plan, parallel)
    return cuts


def join(module: nn.Module, plan: ShardPlan, parallel: TensorParallel, cuts: Mapping[str, Cut]) -> None:
    """Puts the layers that sum or gather over the ranks in place of a loaded module's shares.

    `cuts` are those that `divide` gave.
    """
    for name, style in plan.styles(module).items():
        layer = module.get_submodule(name)
        if style in _ROWS:
            module.set_submodule(name, RowParallelLinear(layer, parallel))
        elif style is Style.VOCABULARY:
            module.set_submodule(name, _head(module, layer, cuts[f"{name}.weight"], parallel))
        elif style is Style.EXPERTS:
            layer.register_forward_hook(lambda _, __, out: parallel.all_reduce(out))


def _divide_linear(
    name: str, layer: nn.Linear | Int8Linear, style: Style, plan: ShardPlan, parallel: TensorParallel
) -> dict[str, Cut]:
    """A weight in 8 bits keeps its scales, which count all of its inputs."""
    dim = 1 if style in _ROWS else 0
    whole = layer.weight.shape[dim]
    first, last = _part(whole, style, plan, parallel)
    weight = Cut(dim, first, last, whole)
    layer.weight = nn.Parameter(weight.of(layer.weight), requires_grad=False)
    layer.out_features, layer.in_features = layer.weight.shape
    cuts = {f"{name}.weight": weight}
    outputs = Cut(0, first, last, whole)
    if layer.bias is not None and dim == 0:
        cuts[f"{name}.bias"] = outputs
        layer.bias = nn.Parameter(outputs.of(layer.bias), requires_grad=False)
    if isinstance(layer, Int8Linear) and dim == 0:
        layer.scale = nn.Parameter(outputs.of(layer.scale), requires_grad=False)
    return cuts


def _divide_table(
    name: str, table: nn.Embedding, plan: ShardPlan, parallel: TensorParallel
) -> dict[str, Cut]:
    """A bias [buckets, heads]."""
    first, last = shares.heads(plan, parallel.rank, parallel.size)
    cut = Cut(1, first, last, plan.heads)
    table.weight = nn.Parameter(cut.of(table.weight), requires_grad=False)
    table.embedding_dim = last - first
    return {f"{name}.weight": cut}


def _divide_experts(name: str, experts: nn.Module, plan: ShardPlan, parallel: TensorParallel) -> None:
    """Parameters [experts, ...]: a rank has its columns, or rows, of every expert."""
    for key, parameter in list(experts.named_parameters(recurse=False)):
        style = plan.style(f"{name}.{key}")
        if parameter.dim() != 3 or style not in _STACKED:
            raise ConfigError(
                f"the tensor-parallel plan does not divide {name}.{key}: give --tensor-parallel 1"
            )
        dim, packed = _STACKED[style]
        halves = parameter.chunk(packed, dim)
        first, last = shares.columns(halves[0].shape[dim], parallel.rank, parallel.size)
        share = torch.cat([half.narrow(dim, first, last - first) for half in halves], dim)
        setattr(experts, key, nn.Parameter(share, requires_grad=False))


def _part(whole: int, style: Style, plan: ShardPlan, parallel: TensorParallel) -> tuple[int, int]:
    """First and last of this rank's outputs, or inputs, of a layer that has `whole`."""
    rank, size = parallel.rank, parallel.size
    if style in (Style.HEADS, Style.HEADS_ROW):
        return _elements(shares.heads(plan, rank, size), whole, plan.heads)
    if style is Style.KV_HEADS:
        return _elements(shares.kv_heads(plan, rank, size), whole, plan.kv_heads)
    return shares.columns(whole, rank, size)


def _elements(heads: tuple[int, int], whole: int, count: int) -> tuple[int, int]:
    dim = whole // count
    return heads[0] * dim, heads[1] * dim


def _count_share(attention: nn.Module, plan: ShardPlan, parallel: TensorParallel) -> None:
    """Makes the counts of an attention module those of the share; transformers' views follow from them."""
    heads, kv_heads = (
        last - first
        for first, last in (
            shares.heads(plan, parallel.rank, parallel.size),
            shares.kv_heads(plan, parallel.rank, parallel.size),
        )
    )
    counts = {
        "num_heads": heads,
        "n_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_key_value_groups": heads // kv_heads,
    }
    for name, count in counts.items():
        if hasattr(attention, name):
            setattr(attention, name, count)


def _head(module: nn.Module, linear: nn.Module, cut: Cut, parallel: TensorParallel) -> nn.Module:
    """The head of a rank; where its weight is a part of another parameter's memory, it keeps that one."""
    bounds = [shares.columns(cut.whole, rank, parallel.size) for rank in range(parallel.size)]
    weight = linear.get_parameter("weight")
    memory = weight.untyped_storage().data_ptr()
    tied = [p for p in module.parameters() if p is not weight and p.untyped_storage().data_ptr() == memory]
    rows = TiedRows(tied[0], cut.first, cut.last) if tied else linear
    return VocabularyParallelHead(rows, [last - first for first, last in bounds], parallel)


def load_share(
    module: nn.Module,
    checkpoint: Checkpoint,
    names: dict[str, str],
    *,
    plan: ShardPlan,
    parallel: TensorParallel | None,
    device: torch.device,
    dtype: torch.dtype,
    tied: Iterable[tuple[str, str]] = (),
    computed: Mapping[str, torch.Tensor] | None = None,
    quantize: bool = False,
) -> None:
    """Fills an empty `module`, as `load_into` does; with `parallel` with this rank's share by `plan`.

    A rank reads its own parts of the checkpoint only, but for 8-bit weights that are divided by inputs: those
    are read whole, one at a time. ConfigError for heads that cannot be divided among so many ranks.
    """
    cuts: dict[str, Cut] = {}
    if parallel is not None:
        check_divides(checkpoint.path, plan.heads, plan.kv_heads, parallel.size)
        cuts = divide(module, plan, parallel)
    load_into(
        module,
        checkpoint,
        names,
        device=device,
        dtype=dtype,
        tied=tuple(tied),
        computed=computed,
        quantize=quantize,
        cuts=cuts,
    )
    if parallel is not None:
        join(module, plan, parallel, cuts)
