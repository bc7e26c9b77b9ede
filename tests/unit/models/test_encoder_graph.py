"""The config of a tower's graphs is validated, and padding is what each buffer needs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from triptych.models.encoder_graph import EncoderCudaGraphConfig, pad_identity, pad_repeat_last, pad_zeros
from triptych.models.registry import before_each_layer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modalities": ()}, "modalities: at least one"),
        ({"buffer_keys": ()}, "buffer_keys: at least one"),
        ({"buffer_keys": ("pixel_values", "pixel_values")}, "has a name twice"),
        ({"buffer_keys": ("pixel values",)}, r"\['pixel values'\] are no identifiers"),
        ({"buffer_keys": ("pixel_values", "")}, "are no identifiers"),
        ({"padding_logics": {"cu_seqlen": pad_repeat_last}}, r"\['cu_seqlen'\] are no buffer_keys"),
        ({"out_hidden_size": 0}, "out_hidden_size: 0 is below 1"),
        ({"token_multiple": 0}, "token_multiple: 0 is below 1"),
        ({"min_token_budget": 100, "token_multiple": 64}, "100 is no multiple of token_multiple 64"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "modalities": ("image",),
        "buffer_keys": ("pixel_values", "cu_seqlens"),
        "out_hidden_size": 8,
    }
    EncoderCudaGraphConfig(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        EncoderCudaGraphConfig(**(good | change))  # type: ignore[arg-type]


def test_padding_fills_exactly_what_is_unused() -> None:
    buffer = torch.tensor([0, 4, 9, 77, 77, 77])
    pad_repeat_last(buffer, 3)
    assert buffer.tolist() == [0, 4, 9, 9, 9, 9]
    pad_zeros(buffer, 2)
    assert buffer.tolist() == [0, 4, 0, 0, 0, 0]
    pad_identity(buffer, 2)
    assert buffer.tolist() == [0, 4, 2, 3, 4, 5]
    for padding in (pad_repeat_last, pad_zeros, pad_identity):
        whole = torch.arange(6)
        padding(whole, 6)
        assert whole.tolist() == [0, 1, 2, 3, 4, 5], "a full buffer has no padding"


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
