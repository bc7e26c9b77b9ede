"""Linear layers whose weight other code reads: they stay as they are, so that it finds what it expects."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn

#: Names of modules and lists from `self`, or from anything else, up to a `weight` that is read.
_Chain = tuple[str, ...]
#: What the weight of a layer in another's place answers as well.
_HARMLESS = frozenset({"dtype", "device"})
#: Where the chain's first module is the one whose code it is.
_SELF = "self"
#: What gives a table of embeddings: no linear layer has such a name.
_EMBEDDINGS = frozenset({"get_input_embeddings"})
#: They run before the weights are there.
_BUILDING = frozenset({"__init__", "_init_weights"})
_LIBRARY, _MODELS = ("torch.", "transformers.", "triptych.", "builtins"), "transformers.models."


def read_elsewhere(module: nn.Module, *, dtypes: bool = False) -> set[int]:
    """The ids of the linear layers in `module` whose weight the code of another module reads.

    By the source of the modules' classes, which is not run: a class without one may read any layer in it.
    With `dtypes` a layer counts, too, whose weight is asked for its dtype alone.
    """
    found: set[int] = set()
    for part in module.modules():
        kind: Any = type(part)
        for chain in _chains(kind, dtypes):
            found.update(id(layer) for layer in _named(part, chain))
    return found


@functools.cache
def _chains(kind: Any, dtypes: bool) -> frozenset[_Chain]:
    """(), which names every layer, among them where a function has no source."""
    bases = [base for base in kind.__mro__ if not base.__module__.startswith(_LIBRARY) or _is_model(base)]
    chains: set[_Chain] = set()
    for base in bases:
        for name, function in vars(base).items():
            function = getattr(function, "fget", getattr(function, "__func__", function))
            if name not in _BUILDING and isinstance(function, FunctionType):
                chains |= _read(inspect.unwrap(function), dtypes)
    return frozenset(chains)


def _is_model(kind: type) -> bool:
    return kind.__module__.startswith(_MODELS)


@functools.cache
def _read(function: FunctionType, dtypes: bool) -> frozenset[_Chain]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return frozenset({()})
    asked = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in _HARMLESS and not dtypes
    }
    weights = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "weight")
    return frozenset(_chain(node.value) for node in weights if id(node) not in asked)


def _chain(node: ast.expr) -> _Chain:
    """The names in `self.layers[0].proj`, without indices; () for what has no names."""
    if isinstance(node, ast.Attribute):
        before = _chain(node.value)
        return (*before, node.attr)
    if isinstance(node, ast.Subscript):
        return _chain(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _EMBEDDINGS:
        return _SELF, node.func.attr
    return (node.id,) if isinstance(node, ast.Name) else ()


def _named(part: nn.Module, chain: _Chain) -> Iterator[nn.Linear]:
    """The linear layers that `chain` may mean in code of `part`."""
    if chain == (_SELF,):
        return
    try:
        named = part.get_submodule(".".join(chain[1:])) if chain[:1] == (_SELF,) else None
    except AttributeError:
        named = None
    if named is not None:
        # A list's name stands for each of its layers.
        yield from (each for each in (named, *named.children()) if isinstance(each, nn.Linear))
        return
    for path, layer in part.named_modules():
        if isinstance(layer, nn.Linear) and (not chain or chain[-1] in path.split(".")[-2:]):
            yield layer
