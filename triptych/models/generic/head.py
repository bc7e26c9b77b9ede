"""The head of any class: its outer forward over hidden states, where it does more than its last layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from triptych.models.generic.sides import base_of, head_of, path_of, with_module

#: Gives logits, or scores, of hidden states [N, hidden_size].
Head = Callable[[torch.Tensor], torch.Tensor]


def outer_head(module: PreTrainedModel, hidden_size: int) -> Head:
    """The class's outer forward over given hidden states where it caps or scales, else the head."""
    base = base_of(module)
    if base is not module and module.get_output_embeddings() is not None:
        outer = with_module(module, "model", _Hidden(base))
        if not _adds_nothing(outer, hidden_size):
            return _Outer(outer)
    head: Any = head_of(module)
    return head  # type: ignore[no-any-return]


class _Hidden(nn.Module):
    """Stands for the base: its output is the hidden states that it was given before."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["base"] = base
        self.hidden: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["base"], name)

    def forward(self, *_: Any, **__: Any) -> _BaseOutput:
        assert self.hidden is not None
        return _BaseOutput(self.hidden)


class _BaseOutput:
    """A base's output with hidden states only."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None


class _Outer:
    """Calls the outer forward with a base that gives `hidden`."""

    def __init__(self, outer: nn.Module) -> None:
        self._outer = outer

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        base: Any = self._outer._modules["model"]
        base.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        try:
            scores: torch.Tensor = self._outer(input_ids=ids).logits
        finally:
            base.hidden = None
        return scores[0]


def _adds_nothing(outer: Any, width: int) -> bool:
    """Whether an outer forward gives what its head gives: with a head that changes nothing, hidden states."""
    bare = with_module(outer, path_of(outer, outer.get_output_embeddings()), nn.Identity())
    # Large enough for a cap to show.
    hidden = torch.randn(2, width, generator=torch.Generator().manual_seed(0)) * 100
    try:
        return torch.equal(_Outer(bare)(hidden), hidden)
    except Exception:  # of any kind: code of the class, which may read its head's weight
        return False
