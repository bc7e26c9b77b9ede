"""A tower pauses before each of its layers."""

from __future__ import annotations

import torch
from torch import nn

from triptych.models.layers import before_each_layer


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mergers = nn.ModuleList([nn.Identity()])
        self.blocks = nn.ModuleList([nn.Identity() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_every_forward_pauses_once_a_layer():
    tower, pauses = Tower(), []
    before_each_layer(tower, lambda: pauses.append(1))
    tower(torch.zeros(1))
    tower(torch.zeros(1))
    assert len(pauses) == 6
