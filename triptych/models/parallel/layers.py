"""The linear layers whose output needs the other ranks: row-parallel ones, and the head."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from triptych.models.parallel.tensor_parallel import TensorParallel


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
