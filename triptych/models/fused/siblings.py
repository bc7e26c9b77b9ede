"""Sibling projections: linear layers that a module's own code applies to the same tensor."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable

from torch import nn

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
