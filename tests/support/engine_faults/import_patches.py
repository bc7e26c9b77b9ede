"""Functions that patch a module of the product as soon as a process has imported it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

#: What is done to a module, by its name.
Patches = Mapping[str, Callable[[ModuleType], None]]


def patch_when_imported(patches: Patches) -> None:
    """From now on each of these modules is patched after its own code has run."""
    sys.meta_path.insert(0, _Finder(patches))


class _PatchingLoader(importlib.abc.Loader):
    """A module's own loader, and the patch after it."""

    def __init__(self, loader: importlib.abc.Loader, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, patches: Patches) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self._patches[fullname])
        return spec
