"""Hooks before each layer of a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules of its longest list; a model without a list is one layer."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[model])


def before_each_layer(model: nn.Module, call: Callable[[], object]) -> None:
    """Calls `call` before each layer of every forward, in the thread that computes it."""

    def hook(module: nn.Module, inputs: object) -> None:
        call()

    for layer in layers_of(model):
        layer.register_forward_pre_hook(hook)
