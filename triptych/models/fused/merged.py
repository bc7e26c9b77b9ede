"""Merged projections: sibling linear layers (q, k and v; gate and up) as one layer with one product.

As vLLM's QKVParallelLinear and MergedColumnParallelLinear, but read from transformers' own code, so that no
family names its layers. Each layer keeps its place and its name; the weights are put together once.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from triptych.models.weights.quantization import Int8Linear
from triptych.models.weights.readers import read_elsewhere

_Values = frozenset[int]
_Groups = tuple[tuple[str, ...], ...]

_known: dict[type[nn.Module], _Groups] = {}


def siblings(kind: type[nn.Module]) -> _Groups:
    """Names of the attributes that `kind.forward` calls with the same tensor alone, in the order of calls.

    Groups of two and more, the largest first; a name is in one group at most. Read from the source of
    `forward`, which is not run; without a source there are no groups.
    """
    if kind not in _known:
        _known[kind] = _read(kind)
    return _known[kind]


def _read(kind: type[nn.Module]) -> _Groups:
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
        body = ast.parse(textwrap.dedent(source)).body[0]
    except (OSError, TypeError, SyntaxError):
        return ()
    if not isinstance(body, ast.FunctionDef):
        return ()
    reader = _CallReader(body.args)
    reader.visit_all(body.body)
    groups, taken = [], set[str]()
    for names in sorted(reader.calls.values(), key=len, reverse=True):
        free = tuple(name for name in names if name not in taken)
        if len(free) > 1:
            groups.append(free)
            taken.update(free)
    return tuple(groups)


class _CallReader(ast.NodeVisitor):
    """Follows which values the names of a function may have, and notes calls `self.NAME(value)`.

    A value is a number; an assignment of anything but a name makes a new one.
    """

    def __init__(self, arguments: ast.arguments) -> None:
        self.calls: dict[int, list[str]] = {}
        self._count = 0
        self._names: dict[str, _Values] = {}
        everything = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        for argument in everything:
            self._names[argument.arg] = self._new()
        self._self = everything[0].arg if everything else ""

    def visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func
        if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
            return
        if function.value.id != self._self or len(node.args) != 1 or node.keywords:
            return
        for value in self._values(node.args[0]):
            names = self.calls.setdefault(value, [])
            if function.attr not in names:
                names.append(function.attr)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        self.visit_all(node.targets)
        if isinstance(node.value, ast.Name | ast.IfExp):
            values = self._values(node.value)
            self._names.update((t.id, values) for t in node.targets if isinstance(t, ast.Name))

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before = dict(self._names)
        self.visit_all(node.body)
        after, self._names = self._names, before
        self.visit_all(node.orelse)
        for name, values in after.items():
            self._names[name] = self._names.get(name, values) | values

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._names[node.id] = self._new()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """A function inside has names of its own, and is perhaps never called."""

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """As a function inside."""

    def _values(self, node: ast.expr) -> _Values:
        if isinstance(node, ast.Name):
            return self._names.get(node.id) or self._new()
        if isinstance(node, ast.IfExp):
            return self._values(node.body) | self._values(node.orelse)
        return self._new()

    def _new(self) -> _Values:
        self._count += 1
        return frozenset((self._count,))


#: Linear layers all of whose parameters have a row, or a number, per output.
_KINDS = (nn.Linear, Int8Linear)


class MergedLinear(nn.Module):
    """The first of some sibling linear layers: it computes the outputs of all, and returns its own.

    The others are `MergedPart`s, which take theirs when they are called with the same tensor.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.linear = _joined(layers)
        #: Outputs of each.
        self.sizes = [_outputs(layer) for layer in layers]
        #: The latest input, and the outputs that were not taken yet.
        self._kept: tuple[torch.Tensor, list[torch.Tensor | None]] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features of the first layer], a view of the whole product."""
        own, *others = self.linear(x).split(self.sizes, -1)
        self._kept = x, list(others)
        first: torch.Tensor = own
        return first

    def part(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """The output of layer `number`, from 1; computed again for another tensor, or a second time."""
        kept = self._kept
        output = kept[1][number - 1] if kept is not None and kept[0] is x else None
        if kept is None or output is None:
            again: torch.Tensor = self.linear(x).split(self.sizes, -1)[number]
            return again
        kept[1][number - 1] = None
        if number == len(self.sizes) - 1:
            # Nothing is held until the next step.
            self._kept = None
        return output


class MergedPart(nn.Module):
    """A linear layer whose weight is part of a `MergedLinear`'s."""

    def __init__(self, merged: MergedLinear, number: int) -> None:
        super().__init__()
        # In a tuple: a submodule would have its parameters twice.
        self._merged = (merged,)
        self._number = number

    def is_of(self, merged: MergedLinear, number: int) -> bool:
        return self._merged[0] is merged and self._number == number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self._merged[0].part(x, self._number)


def merge(module: nn.Module) -> None:
    """Puts a `MergedLinear` and its parts in the place of sibling linear layers, wherever there are some.

    Before prepacking, after loading and division among ranks. The old weights are let go one group at a time.
    A layer, or a weight, that something else holds or reads too stays as it is.
    """
    read = read_elsewhere(module)
    parts = [part for part in module.modules() if part._modules]
    layers = Counter(id(child) for part in parts for child in part._modules.values())
    weights = Counter(id(weight) for part in module.modules() for weight in part.parameters(recurse=False))
    for parent in parts:
        for names in siblings(type(parent)):
            group = [name for name in names if type(parent._modules.get(name)) in _KINDS]
            free = [name for name in group if id(parent.get_submodule(name)) not in read]
            alone = [name for name in free if _is_alone(parent.get_submodule(name), layers, weights)]
            if len(alone) > 1 and _fit([parent.get_submodule(name) for name in alone]):
                _replace(parent, alone)


def whole(layers: Sequence[nn.Module]) -> tuple[nn.Module, list[int]]:
    """The one layer that computes these merged ones, and the outputs of each; ValueError if they are not."""
    first, *others = layers
    if not isinstance(first, MergedLinear) or len(first.sizes) != len(layers):
        raise ValueError(f"{len(layers)} projections are not merged into one")
    for number, other in enumerate(others, 1):
        if not isinstance(other, MergedPart) or not other.is_of(first, number):
            raise ValueError(f"projection {number + 1} of {len(layers)} is merged into another one")
    return first.linear, list(first.sizes)


def _replace(parent: nn.Module, names: Sequence[str]) -> None:
    merged = MergedLinear([parent.get_submodule(name) for name in names])
    for number, name in enumerate(names):
        setattr(parent, name, MergedPart(merged, number) if number else merged)


def _is_alone(layer: nn.Module, layers: Counter[int], weights: Counter[int]) -> bool:
    return layers[id(layer)] == 1 and all(weights[id(weight)] == 1 for weight in layer.parameters())


def _fit(layers: Sequence[nn.Module]) -> bool:
    """Whether their weights can be one: of one kind, one input size, one dtype."""
    return (
        len({(type(layer), layer.in_features, layer.get_parameter("weight").dtype) for layer in layers}) == 1
    )


def _joined(layers: Sequence[nn.Module]) -> nn.Module:
    """A layer of the same kind with all their outputs; a bias that some lack is 0 there."""
    joined = copy.copy(layers[0])
    joined.out_features = sum(_outputs(layer) for layer in layers)  # type: ignore[assignment]
    names = dict.fromkeys(name for layer in layers for name in layer._parameters)
    for name in names:
        # What is None may be kept as a plain attribute, which would hide a parameter of that name.
        joined.__dict__.pop(name, None)
    joined._parameters = {name: _together(layers, name) for name in names}
    return joined


def _together(layers: Sequence[nn.Module], name: str) -> nn.Parameter | None:
    parameters = [layer._parameters.get(name) for layer in layers]
    given = [parameter.detach() for parameter in parameters if parameter is not None]
    if not given:
        return None
    rows = [
        given[0].new_zeros(_outputs(layer)) if parameter is None else parameter.detach()
        for layer, parameter in zip(layers, parameters, strict=True)
    ]
    return nn.Parameter(torch.cat(rows), requires_grad=False)


def _outputs(layer: nn.Module) -> int:
    return int(layer.out_features)  # type: ignore[arg-type]
