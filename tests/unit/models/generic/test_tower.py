"""Faster modules of towers: convolutions over single patches, and the attention of Qwen's towers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionAttention
from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention
from transformers.models.siglip.modeling_siglip import SiglipAttention
from transformers.models.video_llama_3.modeling_video_llama_3 import VideoLlama3VisionAttention

from triptych.models.generic.encoder import PatchConv2d, PatchConv3d, attends_in_segments, speed_up


@pytest.mark.parametrize(("convolution", "faster"), [(nn.Conv2d, PatchConv2d), (nn.Conv3d, PatchConv3d)])
def test_a_convolution_over_patches_gives_what_it_gave(convolution: type, faster: type) -> None:
    generator = torch.Generator().manual_seed(1)
    tower = nn.Sequential(convolution(3, 8, kernel_size=4, stride=4))
    shape = tower[0].kernel_size
    inputs = [torch.randn(5, 3, *(size * count for size in shape), generator=generator) for count in (1, 3)]
    with torch.inference_mode():
        before = [tower(each) for each in inputs]
        speed_up(tower)
        after = [tower(each) for each in inputs]
    assert type(tower[0]) is faster
    for own, given in zip(before, after, strict=True):
        torch.testing.assert_close(given, own, atol=1e-6, rtol=1e-5)


def test_a_convolution_beyond_its_input_stays() -> None:
    tower = nn.Sequential(nn.Conv3d(3, 8, kernel_size=4, padding=1), nn.Conv2d(4, 8, 2, groups=2))
    speed_up(tower)
    assert [type(part) for part in tower] == [nn.Conv3d, nn.Conv2d]


def test_attention_is_replaced_where_its_code_is_that_of_qwen3_vl() -> None:
    assert attends_in_segments(VisionAttention)
    assert attends_in_segments(Glm4vVisionAttention)
    assert not attends_in_segments(VideoLlama3VisionAttention)
    assert not attends_in_segments(SiglipAttention)
