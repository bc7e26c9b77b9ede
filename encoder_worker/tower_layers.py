"""Where a tower can pause: before each of its layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def layers_of(tower: nn.Module) -> list[nn.Module]:
    """The modules of its longest list; a tower without a list is one layer."""
    lists = [list(module) for module in tower.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[tower])


def before_each_layer(tower: nn.Module, pause: Callable[[], object]) -> None:
    """Calls `pause` in the tower's thread before each layer of every forward."""

    def hook(module: nn.Module, inputs: object) -> None:
        pause()

    for layer in layers_of(tower):
        layer.register_forward_pre_hook(hook)
