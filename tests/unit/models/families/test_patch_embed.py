"""The patch embedding as a matrix product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from triptych.models.families.patch_embed import PatchLinear


def test_a_patch_embedding_is_the_convolution_it_stands_for() -> None:
    generator = torch.Generator().manual_seed(1)
    convolution = nn.Conv3d(3, 8, kernel_size=(2, 4, 4), stride=(2, 4, 4))
    patches = torch.randn(5, 3, 2, 4, 4, generator=generator)
    with torch.inference_mode():
        wanted = convolution(patches)
        given = PatchLinear(convolution)(patches)
    assert given.shape == wanted.shape
    torch.testing.assert_close(given, wanted, atol=1e-6, rtol=1e-5)


def test_a_convolution_that_looks_beyond_its_patch_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond one patch"):
        PatchLinear(nn.Conv3d(3, 8, kernel_size=4, stride=2))
